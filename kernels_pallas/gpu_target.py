"""Compile for a GPU that is not here.

XLA's GPU compiler and ptxas come with the CUDA plugin's wheels and need a description of the GPU, not the GPU. A
program compiled this way tells whether it compiles, what memory it needs, what is donated, and its optimised HLO.
Matmul kernels aren't autotuned without a device, so a real GPU may pick others.

Compile checks belong in a process of their own with a time limit: `compile_job.run_job`.
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.experimental import topologies


@dataclass(frozen=True, slots=True)
class GpuTarget:
    """A GPU as XLA must know it, and the peaks that a roofline needs (vendor's data sheet, dense, no sparsity)."""

    name: str
    device_name: str
    compute_capability: tuple[int, int]
    num_cores: int
    bytes_per_second: float
    bf16_flops_per_second: float
    memory_bytes: int
    l2_bytes: int
    shared_memory_per_core: int
    shared_memory_per_block: int
    """Most that one block can ask for (opt-in)."""
    clock_ghz: float


_HOPPER = {"shared_memory_per_core": 233_472, "shared_memory_per_block": 232_448}

TARGETS = {
    target.name: target
    for target in (
        GpuTarget(
            name="h200",
            device_name="NVIDIA H200",
            compute_capability=(9, 0),
            num_cores=132,
            bytes_per_second=4.8e12,
            bf16_flops_per_second=989e12,
            memory_bytes=151_397_597_184,
            l2_bytes=52_428_800,
            clock_ghz=1.98,
            **_HOPPER,
        ),
        GpuTarget(
            name="h100",
            device_name="NVIDIA H100 80GB HBM3",
            compute_capability=(9, 0),
            num_cores=132,
            bytes_per_second=3.35e12,
            bf16_flops_per_second=989e12,
            memory_bytes=85_029_158_912,
            l2_bytes=52_428_800,
            clock_ghz=1.98,
            **_HOPPER,
        ),
    )
}

_TARGET_CONFIG = """
gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32
  shared_memory_per_block: 49152 shared_memory_per_core: {t.shared_memory_per_core}
  shared_memory_per_block_optin: {t.shared_memory_per_block}
  threads_per_core_limit: 2048 core_count: {t.num_cores} fpus_per_core: 128
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
  memory_bandwidth: {bandwidth} l2_cache_size: {t.l2_bytes}
  clock_rate_ghz: {t.clock_ghz} device_memory_size: {t.memory_bytes}
  cuda_compute_capability {{
    major: {t.compute_capability[0]} minor: {t.compute_capability[1]}
    feature_extension: ACCELERATED_FEATURES
  }}
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  device_vendor: "NVIDIA Corporation" name: "{t.device_name}" device_address_bits: 64
  driver_version: "13.0.0" runtime_version: "13.0.0"
  compile_time_toolkit_version: "13.0.0" dnn_version: "9.28.1"
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 28 patch: 1 }}
runtime_version {{ major: 13 minor: 0 patch: 0 }}
device_description_str: "{t.device_name}"
"""
"""Text form of XLA's GpuTargetConfigProto. ACCELERATED_FEATURES makes it sm_90a, without which wgmma is refused."""


def get_target(name: str) -> GpuTarget:
    """Raises `ValueError` that lists the known targets."""
    if name not in TARGETS:
        raise ValueError(f"target must be one of {sorted(TARGETS)}, got {name!r}.")
    return TARGETS[name]


def missing_compiler() -> str | None:
    """What keeps this environment from compiling for a GPU, or None when all is there."""
    for module in ("jax_plugins.xla_cuda13", "jax_plugins.xla_cuda12"):
        try:
            found = importlib.util.find_spec(module)
        except ModuleNotFoundError:
            found = None
        if found is not None:
            return None
    return "JAX's CUDA plugin is not installed; pip install 'jax[cuda13]' brings XLA's GPU compiler and ptxas"


def device_mesh(
    target: str | GpuTarget, num_devices: int = 1, axis_name: str = "x"
) -> jax.sharding.Mesh:
    """A mesh of GPUs that aren't there. Arguments of what is compiled for it carry its shardings.

    Raises `RuntimeError` when the CUDA plugin is missing.
    """
    target = get_target(target) if isinstance(target, str) else target
    if (reason := missing_compiler()) is not None:
        raise RuntimeError(f"Can't compile for {target.device_name}: {reason}.")
    topology = topologies.get_topology_desc(
        platform="cuda",
        target_config=_TARGET_CONFIG.format(t=target, bandwidth=int(target.bytes_per_second)),
        topology=f"1x1x{num_devices}",
    )
    return topologies.make_mesh(topology, (num_devices,), (axis_name,))


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Bytes on one device. `alias` counts arguments whose buffers the outputs take over (donation that worked)."""

    arguments: int
    outputs: int
    alias: int
    temporaries: int

    @property
    def peak(self) -> int:
        return self.arguments + self.outputs - self.alias + self.temporaries


@dataclass(frozen=True, slots=True)
class CompiledReport:
    """A program compiled for a target: seconds spent, memory, and the optimised HLO's text."""

    lower_seconds: float
    """Tracing included."""
    compile_seconds: float
    memory: MemoryUse
    hlo: str
    executable: jax.stages.Compiled


def compile_for(
    mesh: jax.sharding.Mesh,
    fn: Callable[..., Any],
    args: Sequence[Any],
    *,
    donate_argnums: int | Sequence[int] = (),
    out_shardings: Any = None,
    compiler_options: dict[str, Any] | None = None,
) -> CompiledReport:
    """Compile `fn(*args)` for the GPUs of `mesh`.

    Args:
        mesh: From `device_mesh`.
        args: Trees of `jax.ShapeDtypeStruct`; one without a sharding is replicated over the mesh.
        donate_argnums: As for `jax.jit`.
        out_shardings: As for `jax.jit`; None lets XLA choose.
        compiler_options: See `compile_lowered`.
    """
    kwargs = {} if out_shardings is None else {"out_shardings": out_shardings}
    jitted = jax.jit(fn, donate_argnums=donate_argnums, **kwargs)
    return compile_lowered(mesh, lambda: jitted.lower(*placed(mesh, args)), compiler_options)


def placed(mesh: jax.sharding.Mesh, args: Sequence[Any]) -> tuple[Any, ...]:
    """Trees of shapes, replicated over the mesh where they have no sharding."""
    replicated = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())

    def place(leaf: Any) -> jax.ShapeDtypeStruct:
        sharding = getattr(leaf, "sharding", None) or replicated
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    return jax.tree.map(place, tuple(args))


def compile_lowered(
    mesh: jax.sharding.Mesh,
    lower: Callable[[], jax.stages.Lowered],
    compiler_options: dict[str, Any] | None = None,
) -> CompiledReport:
    """Compile what `lower` lowers, with arguments that carry shardings over `mesh`.

    `compiler_options` are XLA's flags without their dashes, e.g.
    {"xla_gpu_fail_ptx_compilation_on_register_spilling": True}.
    """
    start = time.perf_counter()
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        lowered = lower()
    lowered_at = time.perf_counter()
    compiled = lowered.compile(compiler_options=compiler_options)
    compiled_at = time.perf_counter()
    use = compiled.memory_analysis()
    return CompiledReport(
        lower_seconds=lowered_at - start,
        compile_seconds=compiled_at - lowered_at,
        memory=MemoryUse(
            arguments=use.argument_size_in_bytes,
            outputs=use.output_size_in_bytes,
            alias=use.alias_size_in_bytes,
            temporaries=use.temp_size_in_bytes,
        ),
        hlo=compiled.as_text(),
        executable=compiled,
    )
