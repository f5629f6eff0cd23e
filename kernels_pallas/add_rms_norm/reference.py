"""Residual addition and RMS norm in float64 numpy, one row at a time. For tests."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np


def add_rms_norm(
    x_te: jax.Array,
    update: jax.Array,
    weight: jax.Array,
    update_weight: jax.Array | None,
    *,
    eps: float,
    weight_offset: float,
) -> tuple[jax.Array, jax.Array]:
    """See `api.add_rms_norm`. Needs concrete arrays, so it can't be called under jit."""
    dtype = x_te.dtype

    def norm(row: np.ndarray, norm_weight: jax.Array) -> np.ndarray:
        scale = np.sqrt(np.mean(row**2) + eps)
        return row / scale * (np.asarray(norm_weight).astype(np.float64) + weight_offset)

    sums, normed = (np.zeros(x_te.shape, dtype) for _ in range(2))
    for t in range(x_te.shape[0]):
        terms = np.asarray(update)[..., t, :].astype(np.float64)
        added = terms.sum(axis=0) if update.ndim == 3 else terms
        if update_weight is not None:
            added = norm(added, update_weight)
        sums[t] = np.asarray(x_te)[t].astype(np.float64) + added
        normed[t] = norm(sums[t].astype(np.float64), weight)
    return jnp.asarray(sums), jnp.asarray(normed)
