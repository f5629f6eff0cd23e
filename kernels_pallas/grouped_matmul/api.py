"""Entry point of the grouped matmul: checks the arguments and picks a backend."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from kernels_pallas.grouped_matmul import reference, xla
from kernels_pallas.grouped_matmul.mosaic_gpu_config import unsupported
from kernels_pallas.platform_dispatch import PlatformDispatch
from kernels_pallas.quantized_matmul.weight import QuantizedWeight, check_weight
from kernels_pallas.trace_target import log_once, not_hopper


def _mosaic_gpu(*args: Any, **options: Any) -> jax.Array:
    # Imported where it is used: Pallas takes a CPU-only process a second.
    from kernels_pallas.grouped_matmul import mosaic_gpu

    return mosaic_gpu.grouped_matmul(*args, **options)


def _on_cuda(
    rows_mk: jax.Array, weights_gnk: jax.Array | QuantizedWeight, *args: Any, dtype: Any
) -> jax.Array:
    if isinstance(weights_gnk, QuantizedWeight):
        reason: str | None = "its matrices are quantized"
    else:
        reason = not_hopper() or unsupported(rows_mk, weights_gnk, dtype)
    if reason is not None:
        log_once(f"Grouped matmul uses XLA instead of the Mosaic GPU kernel: {reason}.")
        return xla.grouped_matmul(rows_mk, weights_gnk, *args, dtype=dtype)
    log_once("Grouped matmul uses the Mosaic GPU kernel.")
    return _mosaic_gpu(rows_mk, weights_gnk, *args, dtype=dtype)


_by_platform = PlatformDispatch("grouped_matmul", xla.grouped_matmul, cuda=_on_cuda)
_BACKENDS: dict[str, Callable[..., Any]] = {
    "mosaic_gpu": _mosaic_gpu,
    "reference": reference.grouped_matmul,
    "xla": xla.grouped_matmul,
}
_DTYPES = ("bfloat16", "float16", "float32")


def grouped_matmul(
    rows_mk: jax.Array,
    weights_gnk: jax.Array | QuantizedWeight,
    group_sizes: jax.Array,
    *,
    first_row: jax.Array | int = 0,
    dtype: jnp.dtype = jnp.float32,
    implementation: str | None = None,
) -> jax.Array:
    """Multiplies each row by the matrix of its group: what the experts of a mixture do to their tokens.

    Axes: M rows, K contracted, N outputs, G groups.

    Args:
        rows_mk: [M, K], the rows of a group adjacent, groups in order.
        weights_gnk: [G, N, K] in the rows' dtype, or quantized (without quantized activations): then one group's matrix at
            a time is dequantized to that dtype.
        group_sizes: [G] int32, rows of each group; any of them may be 0.
        first_row: int32 scalar, where group 0 starts. first_row + sum(group_sizes) must be at most M.
        dtype: of the result. Products add up in float32.
        implementation: "mosaic_gpu", "xla" or "reference"; None takes the Mosaic GPU kernel where it runs, on GPUs of
            compute capability 9.0 and for the shapes that it takes, and XLA elsewhere. A line in the log says so once.

    Returns:
        [M, N]; zeros for the rows of no group, whatever they hold.

    Raises:
        ValueError: an argument's shape or dtype is not one of the above.
    """
    if rows_mk.ndim != 2 or rows_mk.dtype.name not in _DTYPES:
        raise ValueError(
            f"rows_mk must be [M, K] of a dtype in {_DTYPES}, got {rows_mk.dtype} {rows_mk.shape}"
        )
    num_rows, size = rows_mk.shape
    if weights_gnk.ndim != 3 or weights_gnk.shape[2] != size:
        raise ValueError(
            f"weights_gnk must have shape [G, N, {size}] (K of rows_mk {rows_mk.shape}), "
            f"got {weights_gnk.shape}"
        )
    if isinstance(weights_gnk, QuantizedWeight):
        check_weight(weights_gnk)
        if weights_gnk.format.activation is not None or implementation == "mosaic_gpu":
            raise ValueError(
                "weights_gnk may be quantized for the backends xla and reference, with rows that are not, got "
                f"{weights_gnk.format} and implementation {implementation!r}"
            )
    elif weights_gnk.dtype != rows_mk.dtype:
        raise ValueError(
            f"weights_gnk must have rows_mk's dtype {rows_mk.dtype}, got {weights_gnk.dtype}"
        )
    if group_sizes.shape != weights_gnk.shape[:1] or group_sizes.dtype != jnp.int32:
        raise ValueError(
            f"group_sizes must be int32 [{weights_gnk.shape[0]}] (G of weights_gnk "
            f"{weights_gnk.shape}), got {group_sizes.dtype} {group_sizes.shape}"
        )
    first_row = jnp.asarray(first_row)
    if first_row.shape != () or not jnp.issubdtype(first_row.dtype, jnp.integer):
        raise ValueError(
            f"first_row must be an integer scalar, got {first_row.dtype} {first_row.shape}"
        )
    if implementation is not None and implementation not in _BACKENDS:
        raise ValueError(
            f"implementation must be one of {sorted(_BACKENDS)} or None, got {implementation!r}"
        )
    if num_rows == 0:
        return jnp.zeros((0, weights_gnk.shape[1]), dtype)
    run = _by_platform if implementation is None else _BACKENDS[implementation]
    first_row = first_row.astype(jnp.int32)
    return run(rows_mk, weights_gnk, group_sizes, first_row, dtype=jnp.dtype(dtype))
