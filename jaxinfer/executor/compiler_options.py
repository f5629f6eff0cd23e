"""What XLA is told about the programs of a step, by the devices that they are for."""

from __future__ import annotations

import functools
import logging

import jax
from jax.sharding import Mesh

from jaxinfer.parallel.mesh import replicated
from kernels_pallas.trace_target import hopper

logger = logging.getLogger(__name__)

WHOLE_MATMULS = {"xla_gpu_experimental_force_split_k": 1}
"""Matmuls are cut along their contracted axis where the model asks for it, and nowhere else."""

FIRST_MATMULS = {"xla_gpu_autotune_level": 0}
"""No kernels are timed: of those that can do a matmul, the first one is taken."""


def forward_options(mesh: Mesh) -> dict[str, int] | None:
    """XLA's options for a forward step; None leaves them as they are.

    XLA cuts a matmul of few rows into partial sums for whatever GPU, before it tunes anything, and adds them up in a
    kernel of its own. On Hopper the model does what it needs of this itself, where the sums meet a kernel that is there
    anyway (`models.layers.num_partial_sums`). An XLA that doesn't know the option goes on as it likes.
    """
    device = mesh.devices.flat[0]
    if device.platform not in ("gpu", "cuda") or not hopper(device.device_kind):
        return None
    return WHOLE_MATMULS if _accepts(mesh, tuple(WHOLE_MATMULS.items())) else None


def deterministic_options(mesh: Mesh) -> dict[str, int]:
    """XLA's options for the programs of a deterministic engine.

    XLA picks a GPU's matmul kernels by timing them while it compiles, and the winner of a close race may change from one
    compilation to the next, and with it the bits.
    """
    if mesh.devices.flat[0].platform not in ("gpu", "cuda"):
        return {}
    return FIRST_MATMULS if _accepts(mesh, tuple(FIRST_MATMULS.items())) else {}


@functools.lru_cache(maxsize=8)
def _accepts(mesh: Mesh, options: tuple[tuple[str, int], ...]) -> bool:
    scalar = jax.ShapeDtypeStruct((), "float32", sharding=replicated(mesh))
    try:
        jax.jit(lambda x: -x, compiler_options=dict(options)).lower(scalar).compile()
    except jax.errors.JaxRuntimeError as error:
        logger.warning("XLA refuses %s: %s", dict(options), error)
        return False
    return True
