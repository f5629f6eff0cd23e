"""Attention of one token per request."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def decode_attention(
    q_rnh: jax.Array,
    kv_pages: tuple[jax.Array, jax.Array],
    block_tables: jax.Array,
    seq_lens: jax.Array,
    *,
    scale: float,
    sliding_window: int | None,
    soft_cap: float | None,
) -> jax.Array:
    """q [R, N, H] -> [R, N, H]; rows with seq_len 0 give zeros."""
    k_pages, v_pages = kv_pages
    _, num_kv_heads, page_size, head_size = k_pages.shape
    num_rows, pages_per_row = block_tables.shape
    q_rkgh = q_rnh.reshape(num_rows, num_kv_heads, -1, head_size)
    k_rpksh = k_pages.at[block_tables].get(mode="promise_in_bounds")
    v_rpksh = v_pages.at[block_tables].get(mode="promise_in_bounds")
    scores = scale * jnp.einsum(
        "rkgh,rpksh->rpkgs", q_rkgh, k_rpksh, preferred_element_type=jnp.float32
    )
    if soft_cap is not None:
        scores = soft_cap * jnp.tanh(scores / soft_cap)
    position = jnp.arange(pages_per_row * page_size).reshape(1, pages_per_row, page_size)
    seen_rps = position < seq_lens[:, None, None]
    if sliding_window is not None:
        seen_rps &= position >= seq_lens[:, None, None] - sliding_window
    seen = seen_rps[:, :, None, None, :]
    scores = jnp.where(seen, scores, -1e30)
    peak = scores.max(axis=(1, 4), keepdims=True)
    weights = jnp.where(seen, jnp.exp(scores - peak), 0.0)
    total_rkg = weights.sum(axis=(1, 4))
    v_rpksh = jnp.where(seen_rps[:, :, None, :, None], v_rpksh, 0)
    o_rkgh = jnp.einsum(
        "rpkgs,rpksh->rpkgh",
        weights.astype(v_rpksh.dtype),
        v_rpksh,
        preferred_element_type=jnp.float32,
    ).sum(axis=1)
    o_rkgh = o_rkgh / jnp.maximum(total_rkg, 1e-30)[..., None]
    return o_rkgh.reshape(q_rnh.shape).astype(q_rnh.dtype)
