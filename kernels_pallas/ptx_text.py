"""Read a kernel's PTX into instructions, basic blocks and loops.

Only what checks of order need: opcodes, operands, guards and where in the source an instruction comes from.
"""

from __future__ import annotations

import functools
import linecache
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import PurePosixPath

_STATEMENT = re.compile(r"\s*(?:([{}])|([$\w]+):(?!:)|([^;{}\s][^;]*);)")
_INSTRUCTION = re.compile(r"(?:@(!?[%\w]+)\s+)?([a-z][\w.:]*)\s*(.*)", re.DOTALL)
_REGISTER = re.compile(r"%[a-z]+\d+\b")
_ENDS = {"ret", "exit", "trap"}


@dataclass(frozen=True)
class Instruction:
    opcode: str
    """With its suffixes: "cp.async.bulk.commit_group"."""
    operands: tuple[str, ...]
    guard: str | None
    """The predicate under which it runs, None when it always does."""
    where: str
    """Source file and line, "" when unknown."""
    source: str
    """That line's text, "" when there is none."""
    target: str | None = None
    """Of a branch, the label, made unique."""

    def registers(self, operand: int) -> tuple[str, ...]:
        """Virtual registers that an operand names."""
        return tuple(_REGISTER.findall(self.operands[operand]))

    @cached_property
    def all_registers(self) -> frozenset[str]:
        return frozenset(_REGISTER.findall(" ".join(self.operands)))

    def __str__(self) -> str:
        return f"{self.opcode} ({self.where})" if self.where else self.opcode


@dataclass(frozen=True)
class Block:
    instructions: tuple[Instruction, ...]
    successors: tuple[int, ...]
    """Indices of the blocks that may run next."""


@dataclass(frozen=True)
class Kernel:
    """Block 0 is the entry."""

    name: str
    num_threads: int | None
    """Of a thread block, where the PTX says so."""
    blocks: tuple[Block, ...]
    shared_names: frozenset[str]
    """Of variables in shared memory."""

    @property
    def instructions(self) -> Iterator[Instruction]:
        for block in self.blocks:
            yield from block.instructions

    @cached_property
    def _definitions(self) -> dict[str, list[Instruction]]:
        found: dict[str, list[Instruction]] = {}
        for instruction in self.instructions:
            # An address first means that something is stored there.
            if instruction.operands and not instruction.operands[0].startswith("["):
                for register in instruction.registers(0):
                    found.setdefault(register, []).append(instruction)
        return found

    def may_point_to_shared(self, address: str) -> bool:
        """Whether an address of an unnamed space, an operand's text, may be one in shared memory: unless it is computed
        from none of its variables, and nowhere from what can't be traced."""
        seen: set[str] = set()
        pending = _REGISTER.findall(address)
        while pending:
            register = pending.pop()
            if register in seen:
                continue
            seen.add(register)
            definitions = self._definitions.get(register)
            if definitions is None:
                return True
            for instruction in definitions:
                words = set(re.findall(r"[$\w]+", " ".join(instruction.operands[1:])))
                if words & self.shared_names:
                    return True
                if not instruction.opcode.startswith("ld."):
                    pending += instruction.all_registers - seen
        return bool(set(re.findall(r"[$\w]+", address)) & self.shared_names)

    def innermost_loops(self, opcode: str) -> list[list[Instruction]]:
        """Of the loops that hold an opcode which a regular expression matches from its start, those without another such
        loop inside."""
        pattern = re.compile(opcode)
        found = []
        pending = self._loops(frozenset(range(len(self.blocks))), pattern)
        while pending:
            loop = pending.pop()
            if inner := self._loops(loop - {self._entry(loop)}, pattern):
                pending += inner
            else:
                found.append([i for b in sorted(loop) for i in self.blocks[b].instructions])
        return found

    def _loops(self, among: frozenset[int], opcode: re.Pattern[str]) -> list[frozenset[int]]:
        """The largest sets of blocks of a subset that reach each other and hold the opcode."""
        reached = {block: self._reached(block, among) for block in among}
        loops = {
            frozenset(other for other in reached[block] if block in reached[other])
            for block in among
            if block in reached[block]
        }
        return [
            loop
            for loop in sorted(loops, key=min)
            if any(opcode.match(i.opcode) for b in loop for i in self.blocks[b].instructions)
        ]

    def _reached(self, block: int, among: frozenset[int]) -> set[int]:
        """From a block by one branch or more that stay in the subset."""
        found: set[int] = set()
        pending = [block]
        while pending:
            new = set(self.blocks[pending.pop()].successors) & among - found
            found |= new
            pending += new
        return found

    def _entry(self, loop: frozenset[int]) -> int:
        outside = (b for i, b in enumerate(self.blocks) if i not in loop)
        entered = {s for block in outside for s in block.successors} & loop
        return min(entered or loop)


def parse_kernel(text: str) -> Kernel:
    """Parse the PTX of a module that holds one kernel.

    Raises `ValueError` for text without a kernel, or with control flow that is not followed (calls, jump tables).
    """
    text = re.sub(r"//[^\n]*|/\*.*?\*/", "", text, flags=re.DOTALL)
    entry = re.search(r"\.entry\s+([$\w]+)", text)
    if entry is None:
        raise ValueError("The PTX has no .entry: it holds no kernel.")
    files = dict(re.findall(r'^\s*\.file\s+(\d+)\s+"([^"]*)"', text, re.MULTILINE))
    shared = re.findall(r"\.shared\s+(?:\.align\s+\d+\s+)?\.\w+\s+([$\w]+)", text)
    threads = re.search(r"\.(?:max|req)ntid\s+(\d+)", text)
    # Line marks are the only directives in a body that no semicolon ends.
    body = re.sub(r"(?m)^(\s*\.loc\s[^\n]*)$", r"\1;", text[text.index("{", entry.end()) :])
    blocks = _blocks(list(_items(body, files)))
    return Kernel(entry[1], int(threads[1]) if threads else None, blocks, frozenset(shared))


def _items(body: str, files: dict[str, str]) -> Iterator[str | Instruction]:
    """Labels and instructions in order; names of an inner scope get its number."""
    place, num_scopes = ("", ""), 0
    scopes: list[dict[str, str]] = []
    position = 0
    while (match := _STATEMENT.match(body, position)) is not None:
        position = match.end()
        brace, label, statement = match.groups()
        if brace == "{":
            labels = re.findall(
                r"(?m)^\s*([$\w]+):(?!:)", body[position : _scope_end(body, position)]
            )
            scopes.append({name: f"{name}#{num_scopes}" for name in labels})
            num_scopes += 1
        elif brace == "}":
            scopes.pop()
            if not scopes:
                return
        elif label is not None:
            yield _unique(label, scopes)
        elif statement.startswith(".loc"):
            _, number, line, *_ = statement.split()
            place = _place(files.get(number, number), int(line)) if line != "0" else place
        elif not statement.startswith("."):
            yield _instruction(statement, place, scopes)


@functools.cache
def _place(path: str, line: int) -> tuple[str, str]:
    return f"{PurePosixPath(path).name}:{line}", linecache.getline(path, line).strip()


def _scope_end(body: str, start: int) -> int:
    depth = 1
    for brace in re.finditer(r"[{}]", body[start:]):
        depth += 1 if brace[0] == "{" else -1
        if depth == 0:
            return start + brace.start()
    return len(body)


def _unique(label: str, scopes: list[dict[str, str]]) -> str:
    return next((scope[label] for scope in reversed(scopes) if label in scope), label)


def _instruction(
    statement: str, place: tuple[str, str], scopes: list[dict[str, str]]
) -> Instruction:
    match = _INSTRUCTION.fullmatch(statement.strip())
    if match is None:
        raise ValueError(f"Not a PTX instruction: {statement.strip()[:100]!r}.")
    guard, opcode, rest = match.groups()
    operands = tuple(_split(rest))
    if opcode.startswith(("brx", "call")):
        raise ValueError(f"PTX with {opcode} is not understood: its control flow is not followed.")
    target = _unique(operands[0], scopes) if opcode.split(".")[0] == "bra" else None
    return Instruction(opcode, operands, guard, *place, target)


def _split(operands: str) -> Iterator[str]:
    """The parts between commas that stand outside all brackets."""
    part, depth = "", 0
    for char in operands:
        depth += (char in "{[(") - (char in "}])")
        if char == "," and depth == 0:
            yield part.strip()
            part = ""
        else:
            part += char
    if part.strip():
        yield part.strip()


def _blocks(items: list[str | Instruction]) -> tuple[Block, ...]:
    runs: list[list[Instruction]] = [[]]
    starts: dict[str, int] = {}
    for item in items:
        if isinstance(item, str):
            if runs[-1]:
                runs.append([])
            starts[item] = len(runs) - 1
        else:
            runs[-1].append(item)
            if item.target is not None or item.opcode.split(".")[0] in _ENDS:
                runs.append([])
    blocks = []
    for i, run in enumerate(runs):
        successors = []
        last = run[-1] if run else None
        if last is not None and last.target is not None:
            if last.target not in starts:
                raise ValueError(f"The PTX has a branch to {last.target}, which is nowhere.")
            successors.append(starts[last.target])
        jumps = last is not None and (last.target or last.opcode.split(".")[0] in _ENDS)
        if i + 1 < len(runs) and not (jumps and last.guard is None):
            successors.append(i + 1)
        blocks.append(Block(tuple(run), tuple(dict.fromkeys(successors))))
    return tuple(blocks)
