"""What a compiled program launches, how many bytes and FLOPs that is, and which large inputs it copies.

`cost_analysis()` is empty for a program compiled without a device, so this counts from the optimised HLO's text.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from kernels_pallas.hlo_costs import (
    PASS_THROUGH,
    UPDATES_IN_PLACE,
    aliases,
    bytes_read,
    bytes_written,
    standalone_flops,
)
from kernels_pallas.hlo_text import (
    Computation,
    HloModule,
    Instruction,
    Shape,
    num_bytes,
    parse_module,
)

_NOT_LAUNCHED = PASS_THROUGH | {
    "parameter", "constant", "tuple", "after-all", "partition-id", "replica-id", "add-dependency"
}  # fmt: skip
_COLLECTIVES = ("all-reduce", "all-gather", "all-to-all", "reduce-scatter", "collective-permute")
_COMPUTES = {"dot", "scaled-dot", "gather", "reduce", "broadcast", "custom-call", "iota", "compare"}

type Label = str | tuple[Label, ...] | None
"""The program's input whose data a value holds, untouched or updated in place; None for anything computed."""


@dataclass(frozen=True, slots=True)
class Kernel:
    """One launch, `count` times when it stands in a loop; bytes and FLOPs are of one."""

    name: str
    opcode: str
    source: str
    """Where in the traced function it comes from."""
    flops: int
    bytes_read: int
    bytes_written: int
    inputs: tuple[str, ...]
    """Labels of the program's inputs that it reads or updates."""
    count: int = 1

    @property
    def num_bytes(self) -> int:
        return self.bytes_read + self.bytes_written

    @property
    def is_collective(self) -> bool:
        return self.opcode.startswith(_COLLECTIVES)


@dataclass(frozen=True, slots=True)
class Moved:
    """A large input, or part of one, that `kernel` writes to a new buffer: a copy, slice or another layout of it."""

    kernel: str
    source: str
    label: str
    num_bytes: int


@dataclass(frozen=True)
class HloReport:
    """`moved` is empty for a program that reads weights where they lie and updates caches in place."""

    kernels: tuple[Kernel, ...]
    moved: tuple[Moved, ...]
    aliased_inputs: tuple[str, ...]
    num_open_loops: int
    """Loops whose number of rounds depends on data: each is counted as one round."""

    @property
    def num_kernels(self) -> int:
        return sum(kernel.count for kernel in self.kernels)

    @property
    def flops(self) -> int:
        return sum(kernel.flops * kernel.count for kernel in self.kernels)

    @property
    def num_bytes(self) -> int:
        """Read and written in device memory, were nothing ever served from the L2 cache."""
        return sum(kernel.num_bytes * kernel.count for kernel in self.kernels)

    @property
    def collective_bytes(self) -> int:
        return sum(k.bytes_written * k.count for k in self.kernels if k.is_collective)

    def seconds(self, bytes_per_second: float, flops_per_second: float) -> float:
        """A roofline's time: each kernel as slow as the slower of its bytes and its FLOPs, one after another."""
        return sum(
            k.count * max(k.num_bytes / bytes_per_second, k.flops / flops_per_second)
            for k in self.kernels
        )


def analyze(
    text: str,
    *,
    watched: Mapping[str, int] | None = None,
    indexed_reads: Mapping[str, int] | None = None,
) -> HloReport:
    """Count the kernels of an optimised HLO module.

    Args:
        text: `compiled.as_text()`.
        watched: Inputs whose data may not be moved, with the least bytes that are worth reporting (1 MiB is about
            where a copy starts to cost as much as a launch).
        indexed_reads: Bytes that a custom call reads of this input; what it reaches through indices can't be seen in
            the HLO, and the whole input would be wrong for a paged cache.

    Inputs go by the names that JAX gives them: the traced function's parameter and the path in its tree, such as
    "kv_cache[3][0]". `inputs_of` lists them.
    """
    module = parse_module(text)
    labels = _labels(module)
    walk = _Walk(module, dict(watched or {}), dict(indexed_reads or {}))
    walk.computation(module.entry, list(labels), 1)
    aliased = tuple(labels[i] for i in sorted(module.aliased_parameters))
    return HloReport(tuple(walk.kernels), tuple(walk.moved), aliased, walk.num_open_loops)


def inputs_of(text: str) -> dict[str, int]:
    """Bytes of each of a module's inputs (on one device), by name and in order."""
    module = parse_module(text)
    sizes = [num_bytes(parameter.shape) for parameter in module.entry.parameters]
    return dict(zip(_labels(module), sizes, strict=True))


def _labels(module: HloModule) -> list[str]:
    return [p.op_name or p.name for p in module.entry.parameters]


@dataclass
class _Walk:
    """Follows the schedule, and which values are inputs under another name."""

    module: HloModule
    watched: dict[str, int]
    indexed_reads: dict[str, int]
    kernels: list[Kernel] = field(default_factory=list)
    moved: list[Moved] = field(default_factory=list)
    num_open_loops: int = 0

    def computation(self, computation: Computation, inputs: list[Label], count: int) -> Label:
        """Walk what a computation launches, given the labels of its parameters; the label of its result."""
        held: dict[str, Label] = {}
        for name, instruction in computation.instructions.items():
            held[name] = self._instruction(computation, instruction, held, inputs, count)
        return held[computation.root]

    def _instruction(
        self,
        computation: Computation,
        instruction: Instruction,
        held: dict[str, Label],
        inputs: list[Label],
        count: int,
    ) -> Label:
        operands = [held[name] for name in instruction.operands]
        match instruction.opcode:
            case "parameter":
                return inputs[instruction.parameter_index or 0]
            case "tuple":
                return tuple(operands)
            case "get-tuple-element":
                index = re.search(r"index=(\d+)", instruction.attributes)
                parts = operands[0]
                return parts[int(index[1])] if index and isinstance(parts, tuple) else None
            case "bitcast" | "opt-barrier" | "add-dependency":
                return operands[0]
            case "while":
                body = instruction.called("body")
                assert body is not None
                trips = re.search(r'"known_trip_count":{"n":"(\d+)"', instruction.attributes)
                self.num_open_loops += trips is None
                times = count * (int(trips[1]) if trips else 1)
                after = self.computation(self.module.computations[body], operands, times)
                return _kept(operands[0], after)
            case "call" | "async-start":
                called = instruction.called("to_apply") or instruction.called("calls")
                assert called is not None
                return self.computation(self.module.computations[called], operands, count)
            case "conditional":
                return self._conditional(instruction, operands, count)
            case opcode if opcode in _NOT_LAUNCHED or opcode.endswith(("-done", "-update")):
                return None
        return self._kernel(computation, instruction, operands, count)

    def _conditional(self, instruction: Instruction, operands: list[Label], count: int) -> Label:
        """Every branch is counted: which one runs isn't known."""
        names = re.findall(
            r"(?:true|false)_computation=%?([\w.\-]+)", instruction.attributes
        ) or re.findall(r"branch_computations={([^}]*)}", instruction.attributes)[0].split(", ")
        for name, operand in zip(names, operands[1:], strict=True):
            self.computation(self.module.computations[name.lstrip("%")], [operand], count)
        return None

    def _kernel(
        self, computation: Computation, instruction: Instruction, operands: list[Label], count: int
    ) -> Label:
        read, first_use = 0, {}
        for i, name in enumerate(instruction.operands):
            label = operands[i]
            is_call = instruction.opcode == "custom-call"
            if is_call and isinstance(label, str) and label in self.indexed_reads:
                read += self.indexed_reads[label]
            else:
                size = bytes_read(self.module, computation, instruction, i)
                read += max(0, size - first_use.get(name, 0))
                first_use[name] = max(size, first_use.get(name, 0))
        self.kernels.append(
            Kernel(
                name=instruction.name,
                opcode=instruction.custom_call_target or instruction.opcode,
                source=instruction.op_name,
                flops=standalone_flops(self.module, computation, instruction),
                bytes_read=read,
                bytes_written=bytes_written(self.module, computation, instruction),
                inputs=tuple(dict.fromkeys(label for label in operands if isinstance(label, str))),
                count=count,
            )
        )
        result, moves = self._results(instruction, operands)
        for label, shape in moves:
            size = num_bytes(shape)
            if label in self.watched and size >= self.watched[label]:
                self.moved.append(Moved(instruction.name, instruction.op_name, label, size))
        return result

    def _results(
        self, instruction: Instruction, operands: list[Label]
    ) -> tuple[Label, list[tuple[str, Shape]]]:
        """The label of a launch's result, and (label, shape) of each result that is a moved input."""
        if instruction.opcode == "fusion":
            called = instruction.called("calls")
            assert called is not None
            fused = self.module.computations[called]
            return _root_labels(self.module, fused, fused.instructions[fused.root], operands)
        if instruction.opcode == "custom-call":
            label: Label = None
            for result, operand in aliases(instruction):
                if isinstance(instruction.shape, tuple) and len(instruction.shape) > result:
                    parts = label if isinstance(label, tuple) else (None,) * len(instruction.shape)
                    label = (*parts[:result], operands[operand], *parts[result + 1 :])
                else:
                    label = operands[operand]
            return label, []
        if instruction.opcode in UPDATES_IN_PLACE:
            return operands[0], []
        if instruction.opcode in _COMPUTES or instruction.opcode.startswith(_COLLECTIVES):
            return None, []
        moved = dict.fromkeys(label for label in operands if isinstance(label, str))
        return None, [(label, instruction.shape) for label in moved]


def _kept(before: Label, after: Label) -> Label:
    """What a loop's state holds when its body leaves or updates it in place."""
    if isinstance(before, tuple) and isinstance(after, tuple):
        return tuple(_kept(b, a) for b, a in zip(before, after, strict=True))
    return before if before == after else None


def _root_labels(
    module: HloModule, fused: Computation, root: Instruction, operands: list[Label]
) -> tuple[Label, list[tuple[str, Shape]]]:
    if root.opcode == "tuple":
        parts = [
            _root_labels(module, fused, fused.instructions[name], operands)
            for name in root.operands
        ]
        return tuple(label for label, _ in parts), [move for _, moves in parts for move in moves]
    label, in_place = _origin(module, fused, root, operands)
    if label is None or in_place:
        return label, []
    return None, [(label, root.shape)]


def _origin(
    module: HloModule, fused: Computation, value: Instruction, operands: list[Label]
) -> tuple[str | None, bool]:
    """The input whose data reaches `value` by movement or elementwise arithmetic, and whether it was updated in place."""
    match value.opcode:
        case "parameter":
            label = operands[value.parameter_index or 0]
            return (label if isinstance(label, str) else None), False
        case opcode if opcode in _COMPUTES:
            return None, False
        case "fusion":
            called = value.called("calls")
            assert called is not None
            inner = module.computations[called]
            outer = [
                _origin(module, fused, fused.instructions[name], operands)[0]
                for name in value.operands
            ]
            return _origin(module, inner, inner.instructions[inner.root], outer)
        case "bitcast":
            return _origin(module, fused, fused.instructions[value.operands[0]], operands)
        case opcode if opcode in UPDATES_IN_PLACE:
            target = _unwrapped(fused, fused.instructions[value.operands[0]])
            label, _ = _origin(module, fused, target, operands)
            return label, target.opcode == "parameter"
    for name in value.operands:
        source = fused.instructions[name]
        label, _ = _origin(module, fused, source, operands)
        if label is not None:
            return label, False
    return None, False


def _unwrapped(fused: Computation, value: Instruction) -> Instruction:
    while value.opcode == "bitcast":
        value = fused.instructions[value.operands[0]]
    return value
