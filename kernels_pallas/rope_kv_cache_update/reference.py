"""Norm, rotation and cache write in float64 numpy, one token at a time. For tests."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from kernels_pallas.kv_cache_update.reference import quantize

KVPages = tuple[jax.Array, jax.Array]


def rope_kv_cache_update(
    qkv: jax.Array,
    kv_pages: KVPages,
    slot_mapping: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    q_norm: jax.Array | None,
    k_norm: jax.Array | None,
    kv_scales: tuple[jax.Array, jax.Array] | None = None,
    *,
    norm_eps: float,
    norm_weight_offset: float,
) -> tuple[jax.Array, KVPages]:
    """See `api.rope_kv_cache_update`. Needs concrete arrays, so it can't be called under jit."""
    num_tokens, num_kv_heads, group, head_size = qkv.shape
    num_queries = group - 2
    k_pages, v_pages = (np.array(pages) for pages in kv_pages)
    dtype, page_size = k_pages.dtype, k_pages.shape[2]
    q_dtype = dtype if kv_scales is None else np.asarray(qkv).dtype
    q_tnh = np.zeros((num_tokens, num_kv_heads * num_queries, head_size), q_dtype)

    def head(vector: np.ndarray, weight: jax.Array | None, token: int) -> np.ndarray:
        x = vector.astype(np.float64)
        if weight is not None:
            x /= np.sqrt(np.mean(x**2) + norm_eps)
            x *= np.asarray(weight).astype(np.float64) + norm_weight_offset
        for i, (c, s) in enumerate(
            zip(np.asarray(cos)[token], np.asarray(sin)[token], strict=True)
        ):
            j = i + cos.shape[1]
            x[i], x[j] = x[i] * c - x[j] * s, x[j] * c + x[i] * s
        return x

    def stored(x: np.ndarray, index: int, kv_head: int) -> np.ndarray:
        if kv_scales is None:
            return x.astype(dtype)
        return quantize(x, np.asarray(kv_scales[index])[kv_head], dtype)

    for token, slot in enumerate(np.asarray(slot_mapping).tolist()):
        page, offset = divmod(slot, page_size)
        for kv_head in range(num_kv_heads):
            heads = np.asarray(qkv[token, kv_head])
            for query in range(num_queries):
                row = kv_head * num_queries + query
                q_tnh[token, row] = head(heads[query], q_norm, token).astype(q_dtype)
            k_pages[page, kv_head, offset] = stored(head(heads[-2], k_norm, token), 0, kv_head)
            v_pages[page, kv_head, offset] = stored(heads[-1], 1, kv_head)
    return jnp.asarray(q_tnh), (jnp.asarray(k_pages), jnp.asarray(v_pages))
