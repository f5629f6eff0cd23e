"""Quantized matmul in float64 numpy, the whole weight dequantized. For tests."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from kernels_pallas.quantized_matmul.activations import quantize_activations
from kernels_pallas.quantized_matmul.weight import QuantizedWeight, dequantize


def quantized_matmul(x_mk: jax.Array, weight: QuantizedWeight, *, dtype: jnp.dtype) -> jax.Array:
    """See `api.quantized_matmul`. Needs concrete arrays, so it can't be called under jit."""
    x = np.asarray(x_mk).astype(np.float64)
    if weight.format.activation is not None:
        codes, scales = (
            np.asarray(a).astype(np.float64) for a in quantize_activations(x_mk, weight)
        )
        x = (codes.reshape(*scales.shape, -1) * scales[..., None]).reshape(codes.shape)
    return jnp.asarray(x @ np.asarray(dequantize(weight, jnp.float32)).astype(np.float64).T, dtype)
