"""Compile a program and say of each of its Mosaic GPU kernels what it takes of a core and which instructions it has.

The numbers come from the pipeline that a GPU would get its code from: registers and spills from its own call of ptxas
(for relocatable code, which for instance leaves `setmaxnreg` without effect), instructions from its PTX.
"""

from __future__ import annotations

import contextlib
import ctypes
import io
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import jax

from kernels_pallas.gpu_target import CompiledReport, GpuTarget, compile_lowered, placed
from kernels_pallas.hlo_text import Computation, Instruction, parse_module
from kernels_pallas.ptx_text import Instruction as PtxInstruction
from kernels_pallas.ptx_text import Kernel, parse_kernel

_DUMPS = {
    "MOSAIC_GPU_DUMP_PTX": "1",
    "MOSAIC_GPU_DUMP_PTXAS": "1",
    "MOSAIC_GPU_DUMP_RESOURCES": "1",
}
"""Mosaic GPU prints them; into a directory it would write hundreds of megabytes beside them."""

MATMUL = r"wgmma\.mma_async"
TMA_LOAD = r"cp\.async\.bulk\.(tensor\.)?.*shared::(cta|cluster)\.global"
TMA_STORE = r"cp\.(reduce\.)?async\.bulk\.(tensor\.)?.*global\.shared::cta"


@dataclass(frozen=True)
class KernelReport:
    """One kernel as it would be loaded onto a GPU."""

    name: str
    registers: int
    spilled_bytes: int
    """Stored to local memory and loaded from it, by all instructions for it together."""
    stack_bytes: int
    """Local memory of a thread: spills, and arrays that don't fit into registers."""
    shared_memory: int
    """Bytes of a thread block, barriers included."""
    barriers: tuple[int, ...]
    """Length of each array of barriers."""
    ignores_register_counts: bool
    """Whether ptxas says that it ignores `setmaxnreg`."""
    ptx: Kernel

    @property
    def num_threads(self) -> int:
        """Of a block."""
        assert self.ptx.num_threads is not None, "Mosaic GPU always says so"
        return self.ptx.num_threads

    def count(self, opcode: str) -> int:
        """Instructions whose opcode a regular expression matches from its start."""
        return sum(re.match(opcode, i.opcode) is not None for i in self.ptx.instructions)

    @cached_property
    def inner_loops(self) -> list[list[PtxInstruction]]:
        """Where the work is done: the innermost loops with matmuls or TMA loads, else those with loads by threads."""
        loops = self.ptx.innermost_loops(f"{MATMUL}|{TMA_LOAD}")
        return loops or self.ptx.innermost_loops(r"ld\.global")

    def count_in_loops(self, opcode: str) -> int:
        """As `count`, in `inner_loops` only."""
        return sum(
            re.match(opcode, i.opcode) is not None for loop in self.inner_loops for i in loop
        )

    def blocks_per_core(self, target: GpuTarget) -> int:
        """Thread blocks that fit beside each other, by shared memory, registers and threads."""
        warps = -(-self.num_threads // 32)
        registers = -(-self.registers * 32 // 256) * 256 * warps
        return min(
            target.shared_memory_per_core // (self.shared_memory + _RESERVED_PER_BLOCK),
            _REGISTERS_PER_CORE // registers,
            _THREADS_PER_CORE // self.num_threads,
        )


_RESERVED_PER_BLOCK = 1024
_REGISTERS_PER_CORE = 65_536
_THREADS_PER_CORE = 2048


class KernelCompiler:
    """Compiles programs for the GPUs of a mesh and reports their kernels."""

    _known: ClassVar[dict[str, KernelReport]] = {}
    """By identity. Mosaic compiles a kernel that it has seen in this process no second time."""

    def __init__(self, mesh: jax.sharding.Mesh) -> None:
        self.mesh = mesh

    def __call__(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any],
        *,
        donate_argnums: int | Sequence[int] = (),
    ) -> tuple[CompiledReport, list[KernelReport]]:
        """As `gpu_target.compile_for`; the kernels in the order of the traced program."""
        jitted = jax.jit(fn, donate_argnums=donate_argnums)
        return self.compile_lowered(lambda: jitted.lower(*placed(self.mesh, args)))

    def compile_lowered(
        self,
        lower: Callable[[], jax.stages.Lowered],
        compiler_options: dict[str, Any] | None = None,
    ) -> tuple[CompiledReport, list[KernelReport]]:
        """The same for a program that `lower` lowers; options as for `gpu_target.compile_lowered`."""
        texts: list[str] = []
        resources = io.StringIO()

        def lower_and_keep() -> jax.stages.Lowered:
            with contextlib.redirect_stdout(resources):
                lowered = lower()
            texts.append(lowered.as_text())
            return lowered

        with _environment(_DUMPS), _captured_output() as output:
            compiled = compile_lowered(self.mesh, lower_and_keep, compiler_options)
        sections = _sections(output())
        calls = _calls(texts[0])
        sizes = re.findall(r"^Resources\(.*$", resources.getvalue(), re.MULTILINE)
        told = sizes_by_kernel([identity for identity, _ in calls], sizes)
        if told is None and not self._known.keys() >= dict(calls).keys():
            raise RuntimeError(
                f"The program has {len(calls)} kernels, but Mosaic told the sizes of {len(sizes)}."
            )
        new = [i for i in _launch_order(compiled.hlo) if i not in self._known]
        if len(new) != len(sections):
            raise RuntimeError(
                f"The program has {len(new)} new kernels, but {[name for name, _ in sections]} were compiled."
            )
        # Kernels are compiled as the program is put together, in the order of its launches.
        compiled_as = dict(zip(new, sections, strict=True))
        for identity, call in dict(calls).items():
            if identity not in self._known:
                name, section = compiled_as[identity]
                # A call has its kernel's name somewhere in its serialized code.
                if f"{name}_mosaic_gpu" not in call:
                    raise RuntimeError(f"No telling kernels apart: {name} is not in {call[:300]}.")
                assert told is not None
                self._known[identity] = _report(name, section, told[identity])
        return compiled, [self._known[identity] for identity in dict(calls)]


def sizes_by_kernel(calls: Sequence[str], sizes: Sequence[str]) -> dict[str, str] | None:
    """What Mosaic told of each kernel of a program, given the kernels in the order of their calls.

    It tells of a kernel when it lowers it: at its first call, and again where another function calls it that is lowered
    by itself, as layers of another kind are. None where what was told can't be that: some kernels were lowered before,
    in another program.
    """
    told: dict[str, str] = {}
    rest = list(sizes)
    for i, kernel in enumerate(calls):
        if kernel not in told:
            if not rest:
                return None
            told[kernel] = rest.pop(0)
        elif len(rest) > len(set(calls[i:]) - told.keys()) and rest[0] == told[kernel]:
            rest.pop(0)
    return None if rest else told


def _launch_order(hlo: str) -> list[str]:
    """Identities (hashes) of the kernels that a compiled program calls, by their first launch."""
    module = parse_module(hlo)
    found: dict[str, None] = {}

    def walk(computation: Computation) -> None:
        for instruction in computation.instructions.values():
            identity = re.search(r'\bkernel_hash = "([^"]*)"', instruction.attributes)
            if identity is not None:
                found.setdefault(identity[1])
                continue
            for name in re.findall(r"%?([\w.\-]+)", _called(instruction)):
                if name in module.computations:
                    walk(module.computations[name])

    walk(module.entry)
    return list(found)


def _called(instruction: Instruction) -> str:
    """The text of an instruction's attributes that names computations."""
    names = "calls|to_apply|condition|body|true_computation|false_computation|branch_computations"
    return " ".join(re.findall(rf"\b(?:{names})=({{[^}}]*}}|%?[\w.\-]+)", instruction.attributes))


def _calls(text: str) -> list[tuple[str, str]]:
    """The calls of kernels in a lowered program, with the kernels' identity (hash)."""
    found = []
    for line in text.splitlines():
        identity = re.search(r'@mosaic_gpu.*kernel_hash = "([^"]*)"', line)
        if identity is not None:
            found.append((identity[1], line))
    return found


def _sections(output: str) -> list[tuple[str, str]]:
    """What was printed of each kernel, its PTX and after it ptxas' report, with its name."""
    found = []
    for section in output.split("// Generated by LLVM NVPTX Back-End")[1:]:
        name = re.search(r"\.entry\s+([$\w]+?)_mosaic_gpu_kernel", section)
        assert name is not None, section[:300]
        found.append((name[1], section))
    return found


def _report(name: str, section: str, resources: str) -> KernelReport:
    ptx, _, ptxas = section.partition("ptxas info")

    def number(pattern: str, text: str = ptxas) -> int:
        found = re.search(pattern, text)
        if found is None:
            raise RuntimeError(f"{name}: {pattern!r} is not in {text!r}")
        return int(found[1])

    barriers = re.findall(r"num_barriers=(\d+),[^)]*\): (\d+)", resources)
    lengths = tuple(int(n) for n, times in barriers for _ in range(int(times)))
    return KernelReport(
        name=name,
        registers=number(r"[Uu]sed (\d+) registers"),
        spilled_bytes=number(r"(\d+) bytes spill stores") + number(r"(\d+) bytes spill loads"),
        stack_bytes=number(r"(\d+) bytes stack frame"),
        shared_memory=number(r"smem_scratch_bytes=(\d+)", resources) + 8 * sum(lengths),
        barriers=tuple(sorted(lengths)),
        ignores_register_counts="'setmaxnreg' ignored" in ptxas,
        ptx=parse_kernel(ptx),
    )


@contextlib.contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@contextlib.contextmanager
def _captured_output() -> Iterator[Callable[[], str]]:
    """What compiled code writes to this process's standard output meanwhile."""
    flush = ctypes.CDLL(None).fflush
    sys.stdout.flush()
    flush(None)
    with tempfile.TemporaryFile() as file:
        before = os.dup(1)
        text: list[str] = []
        os.dup2(file.fileno(), 1)
        try:
            yield lambda: text[0]
        finally:
            flush(None)
            os.dup2(before, 1)
            os.close(before)
            file.seek(0)
            text.append(file.read().decode(errors="replace"))
