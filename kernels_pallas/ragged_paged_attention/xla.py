"""Ragged paged attention in plain JAX: the portable backend, tuned for CPU."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from kernels_pallas.ragged_paged_attention.xla_decode import decode_attention
from kernels_pallas.ragged_paged_attention.xla_prefill import prefill_attention


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
    decode_only: bool = False,
) -> jax.Array:
    """See `api.ragged_paged_attention`.

    Requests with one token take the decode path and the others the prefill path; both loop over
    the work that there is, so the one that has none costs next to nothing.
    """
    options = {"scale": scale, "sliding_window": sliding_window, "soft_cap": soft_cap}
    if decode_only:
        return decode_attention(q_tnh, kv_pages, block_tables, seq_lens, **options)
    num_tokens = q_tnh.shape[0]
    starts = query_start_loc[:-1]
    query_lens = query_start_loc[1:] - starts
    decodes = query_lens == 1
    prefilled_tnh = prefill_attention(
        q_tnh,
        kv_pages,
        block_tables,
        seq_lens,
        query_start_loc,
        jnp.where(decodes, 0, query_lens),
        **options,
    )
    decoded_rnh = decode_attention(
        q_tnh.at[starts].get(mode="clip"),
        kv_pages,
        block_tables,
        jnp.where(decodes, seq_lens, 0),
        **options,
    )
    owned = jnp.arange(num_tokens, dtype=jnp.int32) < query_start_loc[-1]
    out_tnh = jnp.where(owned[:, None, None], prefilled_tnh, 0)
    decode_token = jnp.where(decodes, starts, num_tokens)
    return out_tnh.at[decode_token].set(decoded_rnh, mode="drop")
