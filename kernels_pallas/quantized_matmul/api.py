"""Entry point of the quantized matmul: checks the arguments and picks a backend."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from kernels_pallas.platform_dispatch import PlatformDispatch
from kernels_pallas.quantized_matmul import reference, xla
from kernels_pallas.quantized_matmul.mosaic_gpu_config import unsupported
from kernels_pallas.quantized_matmul.weight import QuantizedWeight, as_matrix, check_weight
from kernels_pallas.trace_target import log_once, not_hopper


def _mosaic_gpu(*args: Any, **options: Any) -> jax.Array:
    # Imported where it is used: Pallas takes a CPU-only process a second.
    from kernels_pallas.quantized_matmul import mosaic_gpu

    return mosaic_gpu.quantized_matmul(*args, **options)


def _on_cuda(x_mk: jax.Array, weight: QuantizedWeight, *, dtype: jnp.dtype) -> jax.Array:
    reason = not_hopper() or unsupported(x_mk, weight.shape, weight.format, dtype)
    if reason is not None:
        log_once(f"Quantized matmul uses XLA instead of the Mosaic GPU kernel: {reason}.")
        return xla.dequantized_matmul(x_mk, weight, dtype=dtype)
    log_once("Quantized matmul uses the Mosaic GPU kernel.")
    return _mosaic_gpu(x_mk, weight, dtype=dtype)


_by_platform = PlatformDispatch("quantized_matmul", xla.quantized_matmul, cuda=_on_cuda)
_BACKENDS: dict[str, Callable[..., Any]] = {
    "mosaic_gpu": _mosaic_gpu,
    "reference": reference.quantized_matmul,
    "xla": xla.quantized_matmul,
}
_DTYPES = ("bfloat16", "float16", "float32")


def quantized_matmul(
    x_mk: jax.Array,
    weight: QuantizedWeight,
    *,
    num_in_axes: int = 1,
    dtype: jnp.dtype = jnp.float32,
    implementation: str | None = None,
) -> jax.Array:
    """x times a weight that is never in memory as a whole in a wider type, where a backend is made for the device.

    Axes: M rows, K contracted, N outputs.

    Products of what the codes stand for with x, added up in float32. Where the format quantizes activations, x is
    quantized first: products of int8 are added up exactly, those of e4m3 in float32, and scaled then.

    Args:
        x_mk: [M, K] bfloat16, float16 or float32.
        weight: [*out, *in], `in` being the last `num_in_axes` axes of K elements; N elements in `out`. On a mesh of
            several devices, call it inside `shard_map`: parts of a weight that hold whole groups are weights.
        dtype: of the result.
        implementation: "mosaic_gpu", "xla" or "reference"; None takes the Mosaic GPU kernel where it runs, on GPUs of
            compute capability 9.0 and for the shapes and formats that it takes, and XLA elsewhere. A line in the log says
            so once.

    Returns:
        [M, N].

    Raises:
        ValueError: an argument's shape or dtype is not one of the above, or the weight's arrays don't fit its format.
    """
    if x_mk.ndim != 2 or x_mk.dtype.name not in _DTYPES:
        raise ValueError(
            f"x_mk must be [M, K] of a dtype in {_DTYPES}, got {x_mk.dtype} {x_mk.shape}"
        )
    if not isinstance(weight, QuantizedWeight):
        raise ValueError(f"weight must be a QuantizedWeight, got {type(weight).__name__}")
    if not 1 <= num_in_axes <= weight.ndim:
        raise ValueError(
            f"num_in_axes must be between 1 and {weight.ndim} (axes of weight), got {num_in_axes}"
        )
    check_weight(weight, num_in_axes)
    weight = as_matrix(weight, num_in_axes)
    num_outputs, size = weight.shape
    if x_mk.shape[1] != size:
        raise ValueError(
            f"x_mk must be [M, {size}] (the last {num_in_axes} axes of weight), got {x_mk.shape}"
        )
    if jnp.dtype(dtype).name not in _DTYPES:
        raise ValueError(f"dtype must be one of {_DTYPES}, got {jnp.dtype(dtype)}")
    if implementation is not None and implementation not in _BACKENDS:
        raise ValueError(
            f"implementation must be one of {sorted(_BACKENDS)} or None, got {implementation!r}"
        )
    if x_mk.shape[0] == 0:
        return jnp.zeros((0, num_outputs), dtype)
    run = _by_platform if implementation is None else _BACKENDS[implementation]
    return run(x_mk, weight, dtype=jnp.dtype(dtype))
