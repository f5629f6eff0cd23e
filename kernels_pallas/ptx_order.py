"""What the interpreter of Pallas can't see of a kernel, read from its PTX along every path.

Hopper's matmuls (wgmma) and copies (TMA) run beside the thread that starts them and see shared memory through a proxy of
their own. A store to shared memory reaches them only when the thread that stores fences the proxy and then meets the
other threads at a barrier; registers belong to a matmul from its fence to its wait. A forgotten fence computes the right
numbers in the interpreter, and on a GPU most of the time.

`violations` runs a data-flow analysis over the kernel's control flow, on the safe side: it asks nothing about addresses, so
any store that isn't fenced counts against any matmul or copy that may follow, and an instruction under a guard counts as
missing where it would help and as present where it would harm. Not seen: whether the barrier is the right one, and what one
warp group does to memory that another, not told by a barrier, reads.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from kernels_pallas.ptx_text import Instruction, Kernel

STORE_TO_MATMUL = "store reaches wgmma without proxy fence and barrier"
STORE_TO_COPY_OUT = "store reaches a TMA store without proxy fence and barrier"
STORE_TO_COPY_IN = "store is overtaken by a TMA load: no proxy fence and barrier between"
STORE_TO_ARRIVAL = "store is handed to other threads without a proxy fence"
NO_MATMUL_FENCE = "registers go into wgmma without wgmma.fence"
IN_FLIGHT = "registers of wgmma are used before wgmma.wait_group"
FREED_IN_FLIGHT = "shared memory is given back while wgmma may read it"
REFILL_UNMET = "TMA load refills what other warps' wgmma may still read: no barrier since the wait"
ENDS_IN_FLIGHT = "kernel ends before its wgmma or TMA stores are waited for"

_WARP_GROUP = 128
_MOST_GROUPS = 8
"""Committed groups that are told apart."""


@dataclass(frozen=True)
class Violation:
    rule: str
    """One of this module's constants."""
    at: Instruction
    cause: Instruction | None
    """The store or matmul that `at` should have been kept from."""

    def __str__(self) -> str:
        return f"{self.rule}: {self.at}" + ("" if self.cause is None else f" after {self.cause}")


@dataclass(frozen=True)
class _State:
    """What may have happened on some path to a point of the kernel. Sets are bit masks: of instructions by their number,
    or of registers by theirs."""

    open: int
    """Stores to shared memory that no proxy fence followed."""
    fenced: int = 0
    """Stores that a fence followed, but no barrier."""
    touched: int = -1
    """Registers used since the last wgmma.fence. At the start, all."""
    matmuls: frozenset[tuple[int, int, bool]] = frozenset()
    """Matmuls not waited for: number, groups committed from its own on, and whether a wait meant to leave it running."""
    unmet: int = 0
    """Matmuls that this thread has waited for, and not met the other warps since."""
    copies_out: int = 0
    """TMA stores not waited for."""

    def joined(self, other: _State) -> _State:
        return _State(
            self.open | other.open,
            self.fenced | other.fenced,
            self.touched | other.touched,
            self.matmuls | other.matmuls,
            self.unmet | other.unmet,
            self.copies_out | other.copies_out,
        )


def violations(kernel: Kernel, read_by_threads: Sequence[str] = ()) -> list[Violation]:
    """What the order of a kernel's instructions leaves to chance; empty for a kernel that is in order.

    Stores whose line of source begins with one of `read_by_threads` are to memory that neither matmuls nor copies touch,
    through which threads exchange numbers.
    """
    analysis = _Analysis(kernel, tuple(read_by_threads))
    before: dict[int, _State] = {0: _State(open=0)}
    pending = deque([0])
    while pending:
        block = pending.popleft()
        after = analysis.run(block, before[block], None)
        for successor in kernel.blocks[block].successors:
            known = before.get(successor)
            new = after if known is None else known.joined(after)
            if new != known:
                before[successor] = new
                pending.append(successor)
    found: dict[Violation, None] = {}
    for block in sorted(before):
        analysis.run(block, before[block], found)
    return list(found)


class _Analysis:
    def __init__(self, kernel: Kernel, read_by_threads: tuple[str, ...]) -> None:
        self._instructions = list(kernel.instructions)
        self._stores = [
            _stores_to_shared(i, kernel) and not i.source.startswith(read_by_threads or ("\n",))
            for i in self._instructions
        ]
        names = {name for i in self._instructions for name in i.all_registers}
        number = {name: n for n, name in enumerate(sorted(names))}

        def mask(instruction: Instruction, operands: Iterable[int]) -> int:
            return _mask(number[r] for o in operands for r in instruction.registers(o))

        self._registers = [mask(i, range(len(i.operands))) for i in self._instructions]
        self._fragments = [mask(i, _fragments(i)) for i in self._instructions]
        self._accumulators = [mask(i, _fragments(i)[:1]) for i in self._instructions]
        self._num_threads = kernel.num_threads
        self._first = [0]
        for block in kernel.blocks:
            self._first.append(self._first[-1] + len(block.instructions))

    def run(self, block: int, state: _State, found: dict[Violation, None] | None) -> _State:
        """The state after a block; what is wrong in it goes to `found`."""
        for number in range(self._first[block], self._first[block + 1]):
            if found is not None:
                self._check(number, state, found)
            state = self._after(number, state)
        return state

    def _after(self, number: int, state: _State) -> _State:
        instruction = self._instructions[number]
        opcode, always = instruction.opcode, instruction.guard is None
        touched = state.touched | self._registers[number]
        if _is_matmul(instruction):
            # Matmuls after one another may share accumulators without a fence.
            touched = state.touched | self._registers[number] & ~self._fragments[number]
            matmuls = {m for m in state.matmuls if m[0] != number} | {(number, 0, False)}
            return replace(state, touched=touched, matmuls=frozenset(matmuls))
        state = replace(state, touched=touched) if touched != state.touched else state
        if self._stores[number]:
            return replace(state, open=state.open | 1 << number)
        if opcode.startswith("fence.proxy.async") and ".global" not in opcode and always:
            return replace(state, open=0, fenced=state.fenced | state.open)
        if opcode.startswith(("bar.sync", "barrier.sync", "barrier.cta.sync")) and always:
            return replace(state, fenced=0, unmet=0)
        if opcode.startswith("wgmma.fence") and always:
            return replace(state, touched=0)
        if opcode.startswith("wgmma.commit_group") and always:
            matmuls = {(n, min(c + 1, _MOST_GROUPS), kept) for n, c, kept in state.matmuls}
            return replace(state, matmuls=frozenset(matmuls))
        if opcode.startswith("wgmma.wait_group") and always:
            left = int(instruction.operands[0])
            running = frozenset((n, c, c > 0) for n, c, _ in state.matmuls if c <= left)
            done = _mask(n for n, c, _ in state.matmuls if c > left)
            return replace(state, matmuls=running, unmet=state.unmet | done)
        if _copies_out(opcode):
            return replace(state, copies_out=state.copies_out | 1 << number)
        if opcode.startswith("cp.async.bulk.wait_group") and always:
            is_all = int(instruction.operands[0]) == 0
            return replace(state, copies_out=0) if is_all else state
        return state

    def _check(self, number: int, state: _State, found: dict[Violation, None]) -> None:
        instruction = self._instructions[number]
        opcode = instruction.opcode

        def report(rule: str, causes: int) -> None:
            for cause, other in enumerate(self._instructions):
                if causes >> cause & 1:
                    found[Violation(rule, instruction, other)] = None

        unsafe = state.open | state.fenced
        in_flight = _mask(n for n, _, _ in state.matmuls)
        not_kept = _mask(n for n, _, kept in state.matmuls if not kept)
        if _is_matmul(instruction):
            report(STORE_TO_MATMUL, unsafe)
            if state.touched & self._fragments[number]:
                found[Violation(NO_MATMUL_FENCE, instruction, None)] = None
            # Only as an accumulator may a register be in two matmuls at once.
            mine = self._fragments[number]
            for other, _, _ in state.matmuls:
                shared = mine & self._fragments[other]
                if shared & ~(self._accumulators[number] & self._accumulators[other]):
                    report(IN_FLIGHT, 1 << other)
            return
        for other, _, _ in state.matmuls:
            if self._registers[number] & self._fragments[other]:
                report(IN_FLIGHT, 1 << other)
        if _copies_out(opcode):
            report(STORE_TO_COPY_OUT, unsafe)
        elif _copies_in(opcode):
            report(STORE_TO_COPY_IN, unsafe)
            report(REFILL_UNMET, state.unmet)
            report(FREED_IN_FLIGHT, not_kept)
        elif opcode.startswith("mbarrier.arrive") and "expect_tx" not in opcode:
            report(STORE_TO_ARRIVAL, state.open)
            report(FREED_IN_FLIGHT, not_kept)
        elif self._meets_others(instruction):
            report(STORE_TO_ARRIVAL, state.open)
        elif opcode in ("ret", "exit"):
            report(ENDS_IN_FLIGHT, in_flight | state.copies_out)

    def _meets_others(self, instruction: Instruction) -> bool:
        """Whether a barrier has threads of more than one warp group."""
        if not instruction.opcode.startswith(("bar.", "barrier.")):
            return False
        if len(instruction.operands) < 2:
            return self._num_threads is None or self._num_threads > _WARP_GROUP
        threads = instruction.operands[1]
        return not threads.isdigit() or int(threads) > _WARP_GROUP


def _mask(numbers: Iterable[int]) -> int:
    mask = 0
    for number in numbers:
        mask |= 1 << number
    return mask


def _is_matmul(instruction: Instruction) -> bool:
    return instruction.opcode.startswith("wgmma.mma_async")


def _fragments(instruction: Instruction) -> tuple[int, ...]:
    """Operands of a matmul that lie in registers for as long as it runs: the accumulator, and the left side or not."""
    if not _is_matmul(instruction):
        return ()
    return (0, 1) if instruction.operands[1].startswith("{") else (0,)


def _stores_to_shared(instruction: Instruction, kernel: Kernel) -> bool:
    """Through the generic proxy."""
    parts = instruction.opcode.split(".")
    if parts[0] in ("st", "stmatrix", "red", "atom"):
        if {"global", "local", "param"} & set(parts):
            return False
        address = next(o for o in instruction.operands if o.startswith("["))
        return "shared" in instruction.opcode or kernel.may_point_to_shared(address)
    return parts[:2] == ["cp", "async"] and parts[2] in ("ca", "cg")


def _copies_out(opcode: str) -> bool:
    """From shared memory, by the async proxy."""
    is_bulk = opcode.startswith(("cp.async.bulk.", "cp.reduce.async.bulk."))
    return is_bulk and re.search(r"\.(?:global|shared::cluster)\.shared::cta", opcode) is not None


def _copies_in(opcode: str) -> bool:
    is_bulk = opcode.startswith("cp.async.bulk.")
    return is_bulk and re.search(r"\.shared::(?:cta|cluster)\.global", opcode) is not None
