"""Ragged paged attention in plain JAX: the portable backend, tuned for CPU."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from kernels_pallas.quantized_pages import KVScales
from kernels_pallas.ragged_paged_attention.xla_decode import decode_attention
from kernels_pallas.ragged_paged_attention.xla_prefill import prefill_attention

INVARIANT_TILE, INVARIANT_BLOCK = 16, 8
"""Query tokens of a tile, and tiles at once, where the batch must not matter. A multiple of a vector's lanes: a matmul may
treat rows that are left over in another way."""


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
    kv_scales: KVScales | None = None,
    return_lse: bool = False,
    decode_only: bool = False,
    batch_invariant: bool = False,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """See `api.ragged_paged_attention`.

    Requests with one token take the decode path and the others the prefill path; both loop over
    the work that there is, so the one that has none costs next to nothing.
    """
    options = {
        "scale": scale,
        "sliding_window": sliding_window,
        "soft_cap": soft_cap,
        "sinks": sinks,
        "alibi_slopes": alibi_slopes,
        "kv_scales": kv_scales,
        "return_lse": return_lse,
    }
    if batch_invariant:
        arrays = (q_tnh, kv_pages, block_tables, seq_lens, query_start_loc)
        return _invariant_attention(*arrays, causal=causal, **options)
    if decode_only:
        return decode_attention(q_tnh, kv_pages, block_tables, seq_lens, **options)
    num_tokens = q_tnh.shape[0]
    starts = query_start_loc[:-1]
    query_lens = query_start_loc[1:] - starts
    decodes = query_lens == 1
    prefilled = prefill_attention(
        q_tnh,
        kv_pages,
        block_tables,
        seq_lens,
        query_start_loc,
        jnp.where(decodes, 0, query_lens),
        causal=causal,
        **options,
    )
    # A request's only token sees the whole context, causal or not.
    decoded = decode_attention(
        q_tnh.at[starts].get(mode="clip"),
        kv_pages,
        block_tables,
        jnp.where(decodes, seq_lens, 0),
        **options,
    )
    owned = jnp.arange(num_tokens, dtype=jnp.int32) < query_start_loc[-1]
    decode_token = jnp.where(decodes, starts, num_tokens)

    def merge(prefilled: jax.Array, decoded: jax.Array, unowned: float) -> jax.Array:
        owned_t = owned.reshape(num_tokens, *(1,) * (prefilled.ndim - 1))
        merged = jnp.where(owned_t, prefilled, unowned)
        return merged.at[decode_token].set(decoded, mode="drop")

    if not return_lse:
        return merge(prefilled, decoded, 0)
    return merge(prefilled[0], decoded[0], 0), merge(prefilled[1], decoded[1], -jnp.inf)


def _invariant_attention(
    q_tnh: jax.Array,
    kv_pages: tuple[jax.Array, jax.Array],
    block_tables: jax.Array,
    seq_lens: jax.Array,
    query_start_loc: jax.Array,
    *,
    return_lse: bool,
    **options: Any,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """All requests in tiles, over chunks of one size from the first key on.

    Each row of a tile goes through the same additions, in the same loop, whatever the other rows hold: chunks that it
    doesn't see change nothing.
    """
    result = prefill_attention(
        q_tnh,
        kv_pages,
        block_tables,
        seq_lens,
        query_start_loc,
        query_start_loc[1:] - query_start_loc[:-1],
        return_lse=return_lse,
        tile=INVARIANT_TILE,
        block=INVARIANT_BLOCK,
        long_chunk=None,
        **options,
    )
    owned_t = jnp.arange(q_tnh.shape[0], dtype=jnp.int32) < query_start_loc[-1]
    if not return_lse:
        return jnp.where(owned_t[:, None, None], result, 0)
    out_tnh, lse_tn = result
    return jnp.where(owned_t[:, None, None], out_tnh, 0), jnp.where(
        owned_t[:, None], lse_tn, -jnp.inf
    )
