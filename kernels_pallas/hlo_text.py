"""Read XLA's HLO text (`compiled.as_text()`) into computations and instructions.

Only what counting needs: shapes, opcodes, operands by name, and the attributes as text. Layouts are dropped.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

_BITS = {"pred": 8, "token": 0, "opaque": 0}


@dataclass(frozen=True, slots=True)
class Array:
    """An array's element type as HLO spells it ("bf16") and its dimensions."""

    dtype: str
    dims: tuple[int, ...]

    @property
    def size(self) -> int:
        return math.prod(self.dims)

    @property
    def bits(self) -> int:
        """Bits of one element."""
        if self.dtype in _BITS:
            return _BITS[self.dtype]
        digits = re.match(r"[a-z]+(\d+)", self.dtype)
        return int(digits[1]) if digits else 8

    @property
    def num_bytes(self) -> int:
        return self.size * self.bits // 8


type Shape = Array | tuple[Shape, ...]


def arrays_of(shape: Shape) -> tuple[Array, ...]:
    """The arrays of a possibly nested tuple, in order."""
    if isinstance(shape, Array):
        return (shape,)
    return tuple(array for part in shape for array in arrays_of(part))


def num_bytes(shape: Shape) -> int:
    return sum(array.num_bytes for array in arrays_of(shape))


@dataclass(frozen=True, slots=True)
class Instruction:
    """`operands` are names of instructions in the same computation; for "parameter" and "constant" there are none."""

    name: str
    shape: Shape
    opcode: str
    operands: tuple[str, ...]
    attributes: str
    parameter_index: int | None = None

    def called(self, attribute: str) -> str | None:
        """The computation that an attribute (calls, to_apply, body, condition) names."""
        match = re.search(rf"\b{attribute}=%?([\w.\-]+)", self.attributes)
        return match[1] if match else None

    @property
    def custom_call_target(self) -> str | None:
        match = re.search(r'custom_call_target="([^"]*)"', self.attributes)
        return match[1] if match else None

    @property
    def op_name(self) -> str:
        """Where in the traced function it comes from, e.g. "jit(step)/dot_general"; "" when XLA made it up."""
        match = re.search(r'op_name="([^"]*)"', self.attributes)
        return match[1].replace("\\'", "'") if match else ""

    def dimensions(self, attribute: str) -> tuple[int, ...]:
        """An attribute that lists dimensions, e.g. lhs_contracting_dims={1}."""
        match = re.search(rf"\b{attribute}={{([\d,]*)}}", self.attributes)
        return tuple(int(d) for d in match[1].split(",") if d) if match else ()


@dataclass(frozen=True, slots=True)
class Computation:
    """Instructions by name, in the order of the text; in the entry of a compiled module that is the schedule."""

    name: str
    instructions: dict[str, Instruction]
    root: str

    @property
    def parameters(self) -> list[Instruction]:
        found = [i for i in self.instructions.values() if i.opcode == "parameter"]
        return sorted(found, key=lambda i: i.parameter_index or 0)

    def users(self) -> dict[str, list[tuple[Instruction, int]]]:
        """Per instruction, who uses it and as which operand."""
        found: dict[str, list[tuple[Instruction, int]]] = {name: [] for name in self.instructions}
        for instruction in self.instructions.values():
            for i, operand in enumerate(instruction.operands):
                found[operand].append((instruction, i))
        return found


@dataclass(frozen=True, slots=True)
class HloModule:
    computations: dict[str, Computation]
    entry: Computation
    aliased_parameters: frozenset[int]
    """Entry parameters that share their buffer with an output."""


def parse_module(text: str) -> HloModule:
    """Parse the text of one HLO module. Raises `ValueError` when there is no entry computation."""
    computations: dict[str, Computation] = {}
    entry: Computation | None = None
    name, is_entry, root, body = "", False, "", {}
    header = ""
    for line in re.sub(r"/\*index=\d+\*/", "", text).splitlines():
        if line.startswith("HloModule"):
            header = line
        elif (start := re.match(r"(ENTRY )?%?([\w.\-]+) (?:\(.*\) -> .*)?{$", line)) is not None:
            name, is_entry, root, body = start[2], bool(start[1]), "", {}
        elif line.startswith("}") and name:
            computation = Computation(name, body, root)
            computations[name] = computation
            entry = computation if is_entry else entry
            name = ""
        elif name and " = " in line:
            instruction, is_root = _parse_instruction(line.strip())
            body[instruction.name] = instruction
            root = instruction.name if is_root else root
    if entry is None:
        raise ValueError("The text has no ENTRY computation: it isn't an HLO module's.")
    return HloModule(computations, entry, _aliased_parameters(header))


def _aliased_parameters(header: str) -> frozenset[int]:
    _, _, rest = header.partition("input_output_alias={")
    aliases, depth = "", 1
    for char in rest:
        depth += (char == "{") - (char == "}")
        if depth == 0:
            break
        aliases += char
    return frozenset(int(i) for i in re.findall(r": \((\d+),", aliases))


def _parse_instruction(line: str) -> tuple[Instruction, bool]:
    is_root = line.startswith("ROOT ")
    name, _, rest = line.removeprefix("ROOT ").partition(" = ")
    shape_end = _closing(rest, 0) + 1 if rest.startswith("(") else rest.index(" ")
    opcode, _, _ = rest[shape_end + 1 :].partition("(")
    inside_start = shape_end + 1 + len(opcode)
    inside_end = _closing(rest, inside_start)
    inside = rest[inside_start + 1 : inside_end]
    index = int(inside) if opcode == "parameter" else None
    operands = () if opcode in ("parameter", "constant") else tuple(_operand_names(inside))
    return (
        Instruction(
            name.lstrip("%"),
            _parse_shape(rest[:shape_end]),
            opcode,
            operands,
            rest[inside_end + 1 :],
            index,
        ),
        is_root,
    )


def _operand_names(inside: str) -> list[str]:
    return [part.split(" ")[-1].lstrip("%") for part in _split(inside)]


def _closing(text: str, start: int) -> int:
    """Where the bracket that opens at `start` closes."""
    depth = 0
    for i in range(start, len(text)):
        depth += (text[i] in "({[") - (text[i] in ")}]")
        if depth == 0:
            return i
    raise ValueError(f"Unbalanced brackets in the HLO line {text[:200]!r}.")


def _split(text: str) -> list[str]:
    """The parts between commas that stand outside all brackets."""
    parts, depth, start = [], 0, 0
    for i, char in enumerate(text):
        depth += (char in "({[") - (char in ")}]")
        if char == "," and depth == 0:
            parts.append(text[start:i])
            start = i + 1
    parts.append(text[start:])
    return [part.strip() for part in parts if part.strip()]


def _parse_shape(text: str) -> Shape:
    if text.startswith("("):
        return tuple(_parse_shape(part) for part in _split(text[1 : _closing(text, 0)]))
    match = re.match(r"(\w+)\[([^\]]*)\]", text)
    if match is None:
        raise ValueError(f"Not an HLO shape: {text[:80]!r}.")
    dims = tuple(int(d.lstrip("<=")) for d in match[2].split(",") if d)
    return Array(match[1], dims)
