"""Residual addition and RMS norm as XLA operations, which XLA fuses as it sees fit."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def add_rms_norm(
    x_te: jax.Array,
    update: jax.Array,
    weight: jax.Array,
    update_weight: jax.Array | None,
    *,
    eps: float,
    weight_offset: float,
) -> tuple[jax.Array, jax.Array]:
    """See `api.add_rms_norm`."""
    dtype = x_te.dtype
    if update.ndim == 3:
        update = jnp.sum(update.astype(jnp.float32), axis=0)
    if update_weight is not None:
        update = rms_norm(update, update_weight, eps, weight_offset)
    x_te = x_te + update.astype(dtype)
    return x_te, rms_norm(x_te, weight, eps, weight_offset).astype(dtype)


def rms_norm(x: jax.Array, weight: jax.Array, eps: float, weight_offset: float) -> jax.Array:
    """Normalises the last axis; float32, whatever the input's dtype."""
    x = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps)
    return x * scale * (weight.astype(jnp.float32) + weight_offset)
