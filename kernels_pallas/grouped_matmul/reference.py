"""Grouped matmul in float64 numpy, one group at a time. For tests."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from kernels_pallas.quantized_matmul.weight import QuantizedWeight, dequantize


def grouped_matmul(
    rows_mk: jax.Array,
    weights_gnk: jax.Array | QuantizedWeight,
    group_sizes: jax.Array,
    first_row: jax.Array,
    *,
    dtype: jnp.dtype,
) -> jax.Array:
    """See `api.grouped_matmul`. Needs concrete arrays, so it can't be called under jit."""
    if isinstance(weights_gnk, QuantizedWeight):
        weights_gnk = dequantize(weights_gnk, jnp.float32)
    rows, weights = (np.asarray(x).astype(np.float64) for x in (rows_mk, weights_gnk))
    out_mn = np.zeros((rows.shape[0], weights.shape[1]))
    start = int(first_row)
    for group, size in enumerate(np.asarray(group_sizes).tolist()):
        out_mn[start : start + size] = rows[start : start + size] @ weights[group].T
        start += size
    return jnp.asarray(out_mn, dtype)
