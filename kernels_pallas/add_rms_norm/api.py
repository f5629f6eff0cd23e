"""Entry point of residual addition and RMS norm: checks the arguments and picks a backend."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

from kernels_pallas.add_rms_norm import reference, xla
from kernels_pallas.platform_dispatch import PlatformDispatch
from kernels_pallas.trace_target import log_once, not_hopper

Result = tuple[jax.Array, jax.Array]


def _mosaic_gpu(*args: Any, **options: Any) -> Result:
    # Imported where it is used: Pallas takes a CPU-only process a second.
    from kernels_pallas.add_rms_norm import mosaic_gpu

    return mosaic_gpu.add_rms_norm(*args, **options)


def _on_cuda(
    x_te: jax.Array,
    update: jax.Array,
    weight: jax.Array,
    update_weight: jax.Array | None,
    **options: Any,
) -> Result:
    run = xla.add_rms_norm
    if (reason := not_hopper()) is not None:
        log_once(f"add_rms_norm runs as XLA operations: {reason}.")
        return run(x_te, update, weight, update_weight, **options)
    from kernels_pallas.add_rms_norm import mosaic_gpu

    try:
        mosaic_gpu.config_for(x_te, update, weight, update_weight)
        run = mosaic_gpu.add_rms_norm
    except ValueError as error:
        log_once(f"add_rms_norm runs as XLA operations: {error}.")
    return run(x_te, update, weight, update_weight, **options)


_by_platform = PlatformDispatch("add_rms_norm", xla.add_rms_norm, cuda=_on_cuda)
_BACKENDS = {
    "mosaic_gpu": _mosaic_gpu,
    "reference": reference.add_rms_norm,
    "xla": xla.add_rms_norm,
}


def add_rms_norm(
    x_te: jax.Array,
    update: jax.Array,
    weight: jax.Array,
    *,
    update_weight: jax.Array | None = None,
    eps: float = 1e-6,
    weight_offset: float = 0.0,
    implementation: str | None = None,
) -> Result:
    """Adds to the residual stream what a block of a decoder layer returns, and normalises the sum for the next block.

    Axes: T tokens, E embedding, S partial sums.

    Args:
        x_te: [T, E], the residual stream.
        update: [T, E], or [S, T, E] whose sum over S is meant: what a matmul leaves that S parts of the GPU share.
        weight: [E] of the RMS norm of the sum.
        update_weight: [E] of an RMS norm of the update before it is added; None adds it as it is.
        eps: added to the mean squares.
        weight_offset: added to the weights (1 where they are stored as differences from one).
        implementation: "mosaic_gpu", "reference" or "xla"; None picks by the platform that the program is lowered for
            and by shape. Arithmetic is float32; "xla" rounds the update to x_te's dtype before it is added.

    Returns:
        The sum [T, E], and its norm [T, E] computed from the rounded sum; both in x_te's dtype.

    Raises:
        ValueError: an argument's shape, dtype or value is not one of the above.
    """
    if x_te.ndim != 2 or not jnp.issubdtype(x_te.dtype, jnp.floating):
        raise ValueError(f"x_te must be floating [T, E], got {x_te.dtype} {x_te.shape}")
    is_array = update.ndim in (2, 3) and update.size > 0
    if (
        not is_array
        or update.shape[-2:] != x_te.shape
        or not jnp.issubdtype(update.dtype, jnp.floating)
    ):
        raise ValueError(
            f"update must be floating [T, E] or [S, T, E] with the T, E of x_te {x_te.shape}, "
            f"got {update.dtype} {update.shape}"
        )
    embed_dim = x_te.shape[1]
    for name, array in (("weight", weight), ("update_weight", update_weight)):
        if array is not None and array.shape != (embed_dim,):
            raise ValueError(f"{name} must have shape [{embed_dim}], got {array.shape}")
    if not (math.isfinite(eps) and eps >= 0):
        raise ValueError(f"eps must be finite and not negative, got {eps}")
    if implementation is not None and implementation not in _BACKENDS:
        raise ValueError(
            f"implementation must be one of {sorted(_BACKENDS)} or None, got {implementation!r}"
        )
    run = _by_platform if implementation is None else _BACKENDS[implementation]
    return run(x_te, update, weight, update_weight, eps=eps, weight_offset=weight_offset)
