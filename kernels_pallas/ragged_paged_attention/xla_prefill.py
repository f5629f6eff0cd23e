"""Attention of requests with many tokens each: tiles of query tokens against chunks of keys, with an online softmax.

One loop runs over the tiles that are in use and one inside it over the chunks that the tile may see, so the work follows
the real lengths and nothing larger than tile x chunk is ever held.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from kernels_pallas.quantized_pages import KVScales
from kernels_pallas.ragged_paged_attention.xla_pages import (
    MASKED,
    accumulator,
    log_sum_exp,
    pad_block_tables,
    pages_for,
    read_slots,
    score_scale,
    scores,
    softmax_end,
    softmax_start,
    vary_like,
)


class TilePlan(NamedTuple):
    """Query tiles in token order; only the first `count` entries mean anything."""

    count: jax.Array
    row: jax.Array
    first_token: jax.Array


def plan_tiles(query_lens: jax.Array, starts: jax.Array, tile: int, max_tiles: int) -> TilePlan:
    """Cuts each request's query_lens[r] tokens, which begin at starts[r], into tiles of `tile` tokens."""
    tiles_r = (query_lens + tile - 1) // tile
    ends_r = jnp.cumsum(tiles_r)
    index = jnp.arange(max_tiles, dtype=jnp.int32)
    row = jnp.sum(ends_r[None, :] <= index[:, None], axis=1, dtype=jnp.int32)
    row = jnp.minimum(row, query_lens.shape[0] - 1)
    first_token = starts[row] + (index - (ends_r - tiles_r)[row]) * tile
    return TilePlan(ends_r[-1], row, first_token)


def prefill_attention(
    q_tnh: jax.Array,
    kv_pages: tuple[jax.Array, jax.Array],
    block_tables: jax.Array,
    seq_lens: jax.Array,
    query_start_loc: jax.Array,
    query_lens: jax.Array,
    *,
    scale: float,
    sliding_window: int | None,
    soft_cap: float | None,
    causal: bool,
    sinks: jax.Array | None,
    kv_scales: KVScales | None,
    return_lse: bool,
    tile: int = 64,
    chunk: int = 64,
    long_chunk: int = 512,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """q [T, N, H] -> [T, N, H], with return_lse also [T, N]. They mean something for the tokens of requests with
    query_lens > 0 only.

    query_lens [R] is query_start_loc's differences, or 0 for requests that are left out.
    """
    k_pages, v_pages = kv_pages
    _, num_kv_heads, page_size, head_size = k_pages.shape
    num_tokens, num_heads, _ = q_tnh.shape
    num_rows, pages_per_row = block_tables.shape
    group = num_heads // num_kv_heads
    dtype = accumulator(q_tnh.dtype)
    key_scale = score_scale(scale, kv_scales)
    tile = min(tile, num_tokens)
    chunk_pages = pages_for(chunk, page_size, pages_per_row)
    chunk = chunk_pages * page_size
    long_ratio = max(long_chunk // chunk, 1)
    has_long_chunks = sliding_window is None and pages_per_row > chunk_pages * long_ratio
    if not has_long_chunks:
        long_ratio = 1
    block_tables = pad_block_tables(block_tables, chunk_pages * long_ratio)
    starts, ends = query_start_loc[:-1], query_start_loc[1:]
    plan = plan_tiles(query_lens, starts, tile, -(-num_tokens // tile) + num_rows)
    # A tile may reach past the last token; the padding keeps dynamic_slice from shifting it back.
    q_tkgh = jnp.pad(
        q_tnh.reshape(num_tokens, num_kv_heads, group, head_size),
        ((0, tile), (0, 0), (0, 0), (0, 0)),
    )
    inputs = (q_tnh, *kv_pages, block_tables, seq_lens, query_start_loc)
    token_m = jnp.arange(tile * group, dtype=jnp.int32) // group

    # One sink per row of a tile's scores, [K, tile * G].
    sinks_km = None
    if sinks is not None:
        sinks_km = jnp.tile(sinks.reshape(num_kv_heads, group), (1, tile))

    def one_tile(index, results):
        row, first = plan.row[index], plan.first_token[index]
        q_kigh = lax.dynamic_slice_in_dim(q_tkgh, first, tile).transpose(1, 0, 2, 3)
        q_bkmh = q_kigh.reshape(1, num_kv_heads, tile * group, head_size)
        position = seq_lens[row] - ends[row] + first
        end = seq_lens[row]
        if causal:
            end = jnp.minimum(position + tile, end)
        position_m = position + token_m
        first_chunk = jnp.int32(0)
        if sliding_window is not None:
            first_chunk = jnp.maximum(position - sliding_window + 1, 0) // chunk

        def one_chunk(c, carry, ratio=1, all_seen=False):
            peak, total, acc = carry
            num_pages, num_slots = chunk_pages * ratio, chunk * ratio
            pages = lax.dynamic_slice(block_tables, (row, c * num_pages), (1, num_pages))
            num_valid = (end - c * num_slots).reshape(1)
            k_bksh = read_slots(k_pages, pages, num_valid, q_tnh.dtype)
            v_bksh = read_slots(v_pages, pages, num_valid, q_tnh.dtype)
            score_bkms = scores(q_bkmh, k_bksh, key_scale, soft_cap)
            if not all_seen:
                position_s = c * num_slots + jnp.arange(num_slots, dtype=jnp.int32)
                if causal:
                    seen = position_s[None, :] <= position_m[:, None]
                else:
                    seen = position_s[None, :] < end
                if sliding_window is not None:
                    seen &= position_s[None, :] > position_m[:, None] - sliding_window
                score_bkms = jnp.where(seen, score_bkms, MASKED)
            # A token that sees nothing in its first chunks gathers weights of 1 there, and the
            # fade of the first chunk in which it does see something (its own) wipes them out.
            new_peak = jnp.maximum(peak, score_bkms.max(axis=-1))
            weight = jnp.exp(score_bkms - new_peak[..., None]).astype(v_bksh.dtype)
            fade = jnp.exp(peak - new_peak)
            o_bkmh = jnp.einsum("bkms,bksh->bkmh", weight, v_bksh, preferred_element_type=dtype)
            # The rounded weights are summed: one pass less over the scores.
            total = total * fade + weight.sum(axis=-1, dtype=dtype)
            return new_peak, total, acc * fade[..., None] + o_bkmh

        heads = q_bkmh.shape[:3]
        start = softmax_start(heads, head_size, sinks_km, dtype)
        start = vary_like(start, *inputs)
        if has_long_chunks:
            # What every token of the tile sees needs no mask and is taken in larger bites.
            num_long = (position if causal else end) // (chunk * long_ratio)
            start = lax.fori_loop(
                0, num_long, lambda c, x: one_chunk(c, x, long_ratio, all_seen=True), start
            )
            first_chunk = num_long * long_ratio
        last_chunk = (end + chunk - 1) // chunk
        peak, total, acc = lax.fori_loop(first_chunk, last_chunk, one_chunk, start)
        o_bkmh = softmax_end(total, acc, kv_scales)
        tiles = [o_bkmh.reshape(num_kv_heads, tile, group, head_size)]
        if return_lse:
            lse_bkm = log_sum_exp(peak, total, end > 0)
            tiles.append(lse_bkm.reshape(num_kv_heads, tile, group))
        # Tokens past the end of the request are overwritten by the tiles that come later.
        return tuple(
            lax.dynamic_update_slice_in_dim(result, x.swapaxes(0, 1).astype(result.dtype), first, 0)
            for result, x in zip(results, tiles, strict=True)
        )

    results = (jnp.zeros_like(q_tkgh),)
    if return_lse:
        results += (jnp.zeros(q_tkgh.shape[:-1], dtype),)
    results = lax.fori_loop(0, plan.count, one_tile, vary_like(results, *inputs))
    out_tnh = results[0][:num_tokens].reshape(q_tnh.shape)
    if not return_lse:
        return out_tnh
    return out_tnh, results[1][:num_tokens].reshape(num_tokens, num_heads)
