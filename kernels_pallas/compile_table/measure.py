"""Compile cases and say what their kernels take and what is wrong with them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from kernels_pallas.compile_table.case import Case, Expected
from kernels_pallas.compile_table.operations import OPERATIONS
from kernels_pallas.gpu_target import GpuTarget, device_mesh, get_target
from kernels_pallas.kernel_report import MATMUL, TMA_LOAD, TMA_STORE, KernelCompiler, KernelReport
from kernels_pallas.ptx_order import violations


@dataclass(frozen=True)
class Row:
    """One kernel of one case."""

    case: Case
    kernel: str
    registers: int
    spilled_bytes: int
    shared_memory: int
    """Bytes of a block."""
    num_threads: int
    blocks_per_core: int
    bytes_in_flight: int | None
    """Of a core, while the other stages of each ring are worked on; None for kernels without a ring."""
    stages: int | None
    matmuls: int
    loads: int
    """TMA, like stores."""
    stores: int
    loop_loads: int
    """Of global memory, by threads, in the inner loops; so are stores."""
    loop_stores: int
    ignores_register_counts: bool
    seconds: float
    """To compile the whole case."""
    problems: tuple[str, ...]

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Row:
        problems = tuple(values["problems"])
        return cls(**{**values, "case": Case(**values["case"]), "problems": problems})


def measure(cases: list[dict[str, Any]], target: str) -> list[dict[str, Any]]:
    """Rows of `cases` (fields of `Case`), as `compile_job` can carry them."""
    compiler = KernelCompiler(device_mesh(target))
    rows = []
    for fields in cases:
        rows += measure_case(Case(**fields), compiler, get_target(target))
    return [asdict(row) for row in rows]


def measure_case(case: Case, compiler: KernelCompiler, target: GpuTarget) -> list[Row]:
    operation = OPERATIONS[case.operation]
    program, expected = operation.program(case), operation.expected(case)
    compiled, kernels = compiler(program.fn, program.args, donate_argnums=program.donate_argnums)
    names = sorted(kernel.name for kernel in kernels)
    if names != sorted(expected):
        raise RuntimeError(f"{case}: compiles into {names}, not {sorted(expected)}.")
    seconds = compiled.lower_seconds + compiled.compile_seconds
    return [_row(case, kernel, expected[kernel.name], target, seconds) for kernel in kernels]


def _row(
    case: Case, kernel: KernelReport, expected: Expected, target: GpuTarget, seconds: float
) -> Row:
    blocks = kernel.blocks_per_core(target)
    in_flight = None
    if expected.stages is not None:
        free = expected.stages - expected.stages_in_use
        in_flight = blocks * free * expected.stage_bytes
    return Row(
        case=case,
        kernel=kernel.name,
        registers=kernel.registers,
        spilled_bytes=kernel.spilled_bytes,
        shared_memory=kernel.shared_memory,
        num_threads=kernel.num_threads,
        blocks_per_core=blocks,
        bytes_in_flight=in_flight,
        stages=expected.stages,
        matmuls=kernel.count(MATMUL),
        loads=kernel.count(TMA_LOAD),
        stores=kernel.count(TMA_STORE),
        loop_loads=kernel.count_in_loops(r"ld\.global"),
        loop_stores=kernel.count_in_loops(r"st\.global"),
        ignores_register_counts=kernel.ignores_register_counts,
        seconds=seconds,
        problems=tuple(problems(kernel, expected, target, in_flight)),
    )


def problems(
    kernel: KernelReport, expected: Expected, target: GpuTarget, in_flight: int | None
) -> Iterator[str]:
    """What a kernel does not keep of what is expected of it."""
    if max(kernel.spilled_bytes, kernel.stack_bytes) > expected.most_spilled:
        yield f"spills {kernel.spilled_bytes} bytes, {kernel.stack_bytes} bytes of stack"
    if kernel.shared_memory > target.shared_memory_per_block:
        yield f"{kernel.shared_memory} bytes of shared memory, a block has {target.shared_memory_per_block}"
    if expected.shared_memory is not None and kernel.shared_memory > expected.shared_memory:
        yield (
            f"{kernel.shared_memory} bytes of shared memory, its config accounts for "
            f"{expected.shared_memory}"
        )
    if expected.stages is not None:
        if expected.stages < 2:
            yield f"{expected.stages} stages"
        # Some kernels have a ring for each of two warp groups in one array.
        if not {expected.stages, 2 * expected.stages} & set(kernel.barriers):
            yield f"no ring of {expected.stages} barriers, only {kernel.barriers}"
        if kernel.shared_memory < expected.stages * expected.stage_bytes:
            yield f"{kernel.shared_memory} bytes of shared memory hold no {expected.stages} stages"
    if in_flight is not None and in_flight < expected.least_in_flight:
        yield f"{in_flight >> 10} KiB in flight, at least {expected.least_in_flight >> 10} expected"
    for wanted, opcode, what in (
        (expected.matmuls, MATMUL, "wgmma"),
        (expected.loads, TMA_LOAD, "TMA loads"),
        (expected.stores, TMA_STORE, "TMA stores"),
    ):
        if wanted and not kernel.count(opcode):
            yield f"no {what}"
    if expected.loads and kernel.count_in_loops(r"st\.global|[a-z]+\.local"):
        yield "stores by threads, or local memory, in an inner loop"
    found = violations(kernel.ptx, expected.read_by_threads)
    yield from dict.fromkeys(str(violation) for violation in found)
