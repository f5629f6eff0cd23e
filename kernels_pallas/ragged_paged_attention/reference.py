"""Ragged paged attention the obvious way: one request at a time, whole score matrices. For tests."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np


def ragged_paged_attention(
    q_tnh: jax.Array,
    kv_pages: tuple[jax.Array, jax.Array],
    block_tables: jax.Array,
    seq_lens: jax.Array,
    query_start_loc: jax.Array,
    *,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    causal: bool = True,
    sinks: jax.Array | None = None,
    alibi_slopes: jax.Array | None = None,
    kv_scales: tuple[jax.Array, jax.Array] | None = None,
    return_lse: bool = False,
    decode_only: bool = False,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """See `api.ragged_paged_attention`. Needs concrete lengths, so it can't be called under jit.

    Computes in float32 (float64 if q is), whatever the dtype of the inputs.
    """
    k_pages, v_pages = (
        jax.lax.bitcast_convert_type(pages, jnp.float8_e4m3fn)
        if pages.dtype == jnp.uint8
        else pages
        for pages in kv_pages
    )
    _, num_kv_heads, _, head_size = k_pages.shape
    num_heads = q_tnh.shape[1]
    dtype = jnp.promote_types(q_tnh.dtype, jnp.float32)
    starts = np.asarray(query_start_loc)
    k_scale, v_scale = (1.0, 1.0) if kv_scales is None else (s[:, None] for s in kv_scales)
    sinks = jnp.full(num_heads, -jnp.inf) if sinks is None else sinks
    sinks_kgi = sinks.astype(dtype).reshape(num_kv_heads, -1, 1)
    out = jnp.zeros(q_tnh.shape, dtype)
    lse = jnp.full(q_tnh.shape[:2], -jnp.inf, dtype)
    for row, seq_len in enumerate(np.asarray(seq_lens).tolist()):
        first, last = (row, row + 1) if decode_only else (int(starts[row]), int(starts[row + 1]))
        if seq_len == 0 or first == last:
            continue
        pages = block_tables[row]
        k_jkh = jnp.swapaxes(k_pages[pages], 1, 2).reshape(-1, num_kv_heads, head_size)[:seq_len]
        v_jkh = jnp.swapaxes(v_pages[pages], 1, 2).reshape(-1, num_kv_heads, head_size)[:seq_len]
        q_ikgh = q_tnh[first:last].reshape(last - first, num_kv_heads, -1, head_size).astype(dtype)
        scores = scale * jnp.einsum(
            "ikgh,jkh->kgij", q_ikgh, k_jkh.astype(dtype) * k_scale, precision="highest"
        )
        if soft_cap is not None:
            scores = soft_cap * jnp.tanh(scores / soft_cap)
        position_i = jnp.arange(seq_len - (last - first), seq_len)[:, None]
        position_j = jnp.arange(seq_len)[None, :]
        if alibi_slopes is not None:
            slopes_kgij = alibi_slopes.astype(dtype).reshape(num_kv_heads, -1, 1, 1)
            scores -= slopes_kgij * (position_i - position_j)
        seen = position_j <= position_i if causal else jnp.ones_like(position_j, bool)
        if sliding_window is not None:
            seen &= position_j > position_i - sliding_window
        scores = jnp.where(seen, scores, -jnp.inf)
        v_jkh = jnp.where(seen.any(axis=0)[:, None, None], v_jkh, 0)
        lse_kgi = jnp.logaddexp(jax.nn.logsumexp(scores, axis=-1), sinks_kgi)
        weights = jnp.exp(scores - lse_kgi[..., None])
        o_ikgh = jnp.einsum(
            "kgij,jkh->ikgh", weights, v_jkh.astype(dtype) * v_scale, precision="highest"
        )
        out = out.at[first:last].set(o_ikgh.reshape(last - first, num_heads, head_size))
        lse = lse.at[first:last].set(lse_kgi.transpose(2, 0, 1).reshape(last - first, num_heads))
    out = out.astype(q_tnh.dtype)
    return (out, lse) if return_lse else out
