"""Norm, rotation and cache write as XLA operations, which XLA fuses as it sees fit."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from kernels_pallas.kv_cache_update import xla as kv_cache_update
from kernels_pallas.quantized_pages import KVScales

KVPages = tuple[jax.Array, jax.Array]


def rope_kv_cache_update(
    qkv: jax.Array,
    kv_pages: KVPages,
    slot_mapping: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    q_norm: jax.Array | None,
    k_norm: jax.Array | None,
    kv_scales: KVScales | None = None,
    *,
    norm_eps: float,
    norm_weight_offset: float,
) -> tuple[jax.Array, KVPages]:
    """See `api.rope_kv_cache_update`."""
    num_tokens, num_kv_heads, group, head_size = qkv.shape
    # Keys for 8-bit pages are rounded once, there.
    dtype = kv_pages[0].dtype if kv_scales is None else qkv.dtype
    kv_dtype = dtype if kv_scales is None else jnp.float32
    q_tkgh, k_tkh, v_tkh = qkv[:, :, :-2], qkv[:, :, -2], qkv[:, :, -1]

    def prepared(x: jax.Array, weight: jax.Array | None, dtype: jnp.dtype) -> jax.Array:
        x = x.astype(jnp.float32)
        if weight is not None:
            x = rms_norm(x, weight, norm_eps, norm_weight_offset)
        return rotate(x, cos, sin).astype(dtype)

    q_tkgh = prepared(q_tkgh, q_norm, dtype)
    q_tnh = q_tkgh.reshape(num_tokens, num_kv_heads * (group - 2), head_size)
    kv_pages = kv_cache_update.kv_cache_update(
        kv_pages,
        prepared(k_tkh, k_norm, kv_dtype),
        v_tkh.astype(kv_dtype),
        slot_mapping,
        kv_scales,
    )
    return q_tnh, kv_pages


def rms_norm(x: jax.Array, weight: jax.Array, eps: float, weight_offset: float) -> jax.Array:
    """Normalises the last axis of float32 `x`."""
    scale = jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps)
    return x * scale * (weight.astype(jnp.float32) + weight_offset)


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """[T, ..., H] float32 -> the same with the first D dimensions of each head rotated, by [T, D/2]."""
    half = cos.shape[-1]
    cos, sin = (r.reshape(r.shape[0], *(1,) * (x.ndim - 2), half) for r in (cos, sin))
    first, second, unrotated = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return jnp.concatenate(
        [first * cos - second * sin, second * cos + first * sin, unrotated], axis=-1
    )
