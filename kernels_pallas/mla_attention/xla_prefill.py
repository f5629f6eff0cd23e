"""Latent attention of requests with many tokens each: tiles of query tokens against chunks of the cache.

All heads share the cache, so a tile of tokens times heads is one matrix, and a step is two plain matmuls. One loop runs
over the tiles that are in use and one inside it over the chunks that the tile may see; nothing larger than tile x chunk
is ever held.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from kernels_pallas.ragged_paged_attention.xla_pages import (
    MASKED,
    accumulator,
    fold,
    log_sum_exp,
    pad_block_tables,
    pages_for,
    read_slots,
    softmax_end,
    softmax_start,
    vary_like,
)
from kernels_pallas.ragged_paged_attention.xla_prefill import plan_tiles

_TILE_ROWS = 512
"""Query tokens times heads of a tile, as matmuls are at their best from 256 rows up."""
_CHUNK, _LONG_CHUNK = 64, 512


def prefill_attention(
    q_tnc: jax.Array,
    latent_pages: jax.Array,
    block_tables: jax.Array,
    seq_lens: jax.Array,
    query_start_loc: jax.Array,
    query_lens: jax.Array,
    *,
    scale: float,
) -> tuple[jax.Array, jax.Array]:
    """q [T, N, C] -> weighted rows of the cache [T, N, C] and their log-sum-exp [T, N].

    Meaningful for the tokens of requests with query_lens > 0 only; query_lens [B] is query_start_loc's differences, or
    0 for requests that are left out.
    """
    num_tokens, num_heads, width = q_tnc.shape
    num_rows, pages_per_row = block_tables.shape
    page_size = latent_pages.shape[1]
    dtype = accumulator(q_tnc.dtype)
    tile = min(max(_TILE_ROWS // num_heads, 1), num_tokens)
    chunk_pages = pages_for(_CHUNK, page_size, pages_per_row)
    chunk = chunk_pages * page_size
    long_ratio = max(_LONG_CHUNK // chunk, 1)
    if pages_per_row <= chunk_pages * long_ratio:
        long_ratio = 1
    block_tables = pad_block_tables(block_tables, chunk_pages * long_ratio)
    starts, ends = query_start_loc[:-1], query_start_loc[1:]
    plan = plan_tiles(query_lens, starts, tile, -(-num_tokens // tile) + num_rows)
    # A tile may reach past the last token; the padding keeps dynamic_slice from shifting it back.
    q_tnc = jnp.pad(q_tnc, ((0, tile), (0, 0), (0, 0)))
    inputs = (q_tnc, latent_pages, block_tables, seq_lens, query_start_loc)
    token_m = jnp.arange(tile * num_heads, dtype=jnp.int32) // num_heads

    def one_tile(index, carry):
        out_tnc, lse_tn = carry
        row, first = plan.row[index], plan.first_token[index]
        q_mc = lax.dynamic_slice_in_dim(q_tnc, first, tile).reshape(tile * num_heads, width)
        position = seq_lens[row] - ends[row] + first
        end = jnp.minimum(position + tile, seq_lens[row])
        position_m = position + token_m

        def one_chunk(c, carry, ratio=1, all_seen=False):
            num_pages, num_slots = chunk_pages * ratio, chunk * ratio
            pages = lax.dynamic_slice(block_tables, (row, c * num_pages), (1, num_pages))
            num_valid = (end - c * num_slots).reshape(1)
            cached_sc = read_slots(latent_pages[:, None], pages, num_valid, q_tnc.dtype)[0, 0]
            score_ms = scale * jnp.einsum(
                "mc,sc->ms", q_mc, cached_sc, preferred_element_type=dtype
            )
            if not all_seen:
                position_s = c * num_slots + jnp.arange(num_slots, dtype=jnp.int32)
                seen_ms = position_s[None, :] <= position_m[:, None]
                score_ms = jnp.where(seen_ms, score_ms, MASKED)

            # Every token sees position 0, so no peak is MASKED after the first chunk.
            def weighted_sum(weight_ms):
                return jnp.einsum("ms,sc->mc", weight_ms, cached_sc, preferred_element_type=dtype)

            return fold(carry, score_ms, cached_sc.dtype, weighted_sum)

        start = softmax_start(q_mc.shape[:1], width, None, dtype)
        carry = vary_like(start, *inputs)
        first_chunk = jnp.int32(0)
        if long_ratio > 1:
            # What every token of the tile sees needs no mask and is taken in larger bites.
            num_long = position // (chunk * long_ratio)
            carry = lax.fori_loop(
                0, num_long, lambda c, x: one_chunk(c, x, long_ratio, all_seen=True), carry
            )
            first_chunk = num_long * long_ratio
        last_chunk = (end + chunk - 1) // chunk
        peak_m, total_m, acc_mc = lax.fori_loop(first_chunk, last_chunk, one_chunk, carry)
        out_mc = softmax_end(total_m, acc_mc, None)
        lse_m = log_sum_exp(peak_m, total_m, total_m > 0)
        # Tokens past the end of the request are overwritten by the tiles that come later.
        return (
            lax.dynamic_update_slice_in_dim(
                out_tnc, out_mc.reshape(tile, num_heads, width).astype(out_tnc.dtype), first, 0
            ),
            lax.dynamic_update_slice_in_dim(lse_tn, lse_m.reshape(tile, num_heads), first, 0),
        )

    start = (jnp.zeros_like(q_tnc), jnp.full(q_tnc.shape[:2], -jnp.inf, dtype))
    out_tnc, lse_tn = lax.fori_loop(0, plan.count, one_tile, vary_like(start, *inputs))
    return out_tnc[:num_tokens], lse_tn[:num_tokens]
