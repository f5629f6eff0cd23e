"""Attention of requests with many tokens each: tiles of query tokens against chunks of keys, with an online softmax.

Tiles are sorted by the length of what they see, and a loop takes a block of them at a time, as batches of small dots that
keep the cores' caches warm and both cores at work; a loop inside goes over the chunks that the block's longest tile may see. So
the work follows the real lengths, and nothing larger than block x tile x chunk is ever held.
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
    fold,
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

_NEVER = jnp.iinfo(jnp.int32).max


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
    alibi_slopes: jax.Array | None,
    kv_scales: KVScales | None,
    return_lse: bool,
    tile: int = 32,
    block: int = 8,
    chunk: int = 64,
    long_chunk: int | None = 512,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """q [T, N, H] -> [T, N, H], with return_lse also [T, N]. They mean something for the tokens of requests with
    query_lens > 0 only.

    query_lens [R] is query_start_loc's differences, or 0 for requests that are left out. Where all tokens of a block of
    tiles see `long_chunk` keys, these are taken at once, in another loop; None: never.
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
    long_ratio, has_long_chunks = 1, False
    if long_chunk is not None and sliding_window is None:
        long_ratio = max(long_chunk // chunk, 1)
        has_long_chunks = pages_per_row > chunk_pages * long_ratio
    if not has_long_chunks:
        long_ratio = 1
    block_tables = pad_block_tables(block_tables, chunk_pages * long_ratio)
    page_ids = block_tables.reshape(num_rows, -1, chunk_pages)

    # As many tiles at once as a step of this many tokens fills: few rows that only pad it.
    block = max(min(block, num_tokens // tile), 1)
    starts, ends = query_start_loc[:-1], query_start_loc[1:]
    max_tiles = -(-num_tokens // tile) + num_rows
    max_tiles += -max_tiles % block
    plan = plan_tiles(query_lens, starts, tile, max_tiles)
    in_use = jnp.arange(max_tiles, dtype=jnp.int32) < plan.count
    position = seq_lens[plan.row] - ends[plan.row] + plan.first_token
    end = seq_lens[plan.row]
    if causal:
        end = jnp.minimum(position + tile, end)
    rank, order = _sorted_by(jnp.where(in_use, end, _NEVER))
    q_tkgh = q_tnh.reshape(num_tokens, num_kv_heads, group, head_size)
    token_m = jnp.arange(tile * group, dtype=jnp.int32) // group

    def by_row(values: jax.Array | None) -> jax.Array | None:
        """Of each head [N], for the rows of a tile's scores: [K, tile * G]."""
        return None if values is None else jnp.tile(values.reshape(num_kv_heads, group), (1, tile))

    sinks_km, slopes_km = by_row(sinks), by_row(alibi_slopes)

    def one_block(step, results):
        tiles = lax.dynamic_slice_in_dim(order, step * block, block)
        used, row = in_use[tiles], plan.row[tiles]
        first, end_b = plan.first_token[tiles], jnp.where(used, end[tiles], 0)
        token_bi = first[:, None] + jnp.arange(tile, dtype=jnp.int32)
        q_bikgh = q_tkgh.at[token_bi].get(mode="clip")
        q_bkmh = q_bikgh.transpose(0, 2, 1, 3, 4)
        q_bkmh = q_bkmh.reshape(block, num_kv_heads, tile * group, head_size)
        position_b = position[tiles]
        position_bm = position_b[:, None] + token_m
        first_chunk = jnp.int32(0)
        if sliding_window is not None:
            oldest = jnp.where(used, position_b, _NEVER).min() - sliding_window + 1
            first_chunk = jnp.maximum(oldest, 0) // chunk

        def one_chunk(c, carry, ratio=1, all_seen=False):
            num_slots = chunk * ratio
            chunks = c * ratio + jnp.arange(ratio, dtype=jnp.int32)
            pages = page_ids.at[row[:, None], chunks].get(mode="promise_in_bounds")
            num_valid = end_b - c * num_slots
            pages = pages.reshape(block, chunk_pages * ratio)
            k_bksh = read_slots(k_pages, pages, num_valid, q_tnh.dtype)
            # A weight of 0 times the NaN of a page that fell out of the tile's window would be NaN.
            first_seen = None
            if sliding_window is not None:
                first_seen = position_b - sliding_window + 1 - c * num_slots
            v_bksh = read_slots(v_pages, pages, num_valid, q_tnh.dtype, first_seen)
            score_bkms = scores(q_bkmh, k_bksh, key_scale, soft_cap)
            position_s = c * num_slots + jnp.arange(num_slots, dtype=jnp.int32)
            if slopes_km is not None:
                distance_bms = (position_bm[..., None] - position_s).astype(dtype)
                score_bkms -= slopes_km[..., None].astype(dtype) * distance_bms[:, None]
            if not all_seen:
                if causal:
                    seen_bms = position_s <= position_bm[..., None]
                else:
                    seen_bms = position_s < end_b[:, None, None]
                if sliding_window is not None:
                    seen_bms &= position_s > position_bm[..., None] - sliding_window
                score_bkms = jnp.where(seen_bms[:, None], score_bkms, MASKED)

            def weighted_sum(weight):
                return jnp.einsum("bkms,bksh->bkmh", weight, v_bksh, preferred_element_type=dtype)

            # A token that sees nothing in its first chunks gathers weights of 1 there, and the
            # fade of the first chunk in which it does see something (its own) wipes them out.
            return fold(carry, score_bkms, v_bksh.dtype, weighted_sum)

        start = softmax_start(q_bkmh.shape[:3], head_size, sinks_km, dtype)
        start = vary_like(start, *inputs)
        if has_long_chunks:
            # What every token of the block sees needs no mask and is taken in larger bites.
            seen_by_all = jnp.where(used, position_b if causal else end_b, _NEVER).min()
            num_long = seen_by_all // (chunk * long_ratio)
            start = lax.fori_loop(
                0, num_long, lambda c, x: one_chunk(c, x, long_ratio, all_seen=True), start
            )
            first_chunk = num_long * long_ratio
        last_chunk = (end_b.max() + chunk - 1) // chunk
        peak, total, acc = lax.fori_loop(first_chunk, last_chunk, one_chunk, start)
        attended = [softmax_end(total, acc, kv_scales)]
        if return_lse:
            attended.append(log_sum_exp(peak, total, (end_b > 0)[:, None, None]))

        def write(result: jax.Array, x: jax.Array) -> jax.Array:
            # [B, K, tile * G, ...] to [B, tile, K, G, ...].
            x = x.reshape(block, num_kv_heads, tile, group, *x.shape[3:]).swapaxes(1, 2)
            return lax.dynamic_update_slice_in_dim(result, x.astype(result.dtype), step * block, 0)

        return tuple(map(write, results, attended))

    inputs = (q_tnh, *kv_pages, block_tables, seq_lens, query_start_loc)
    shape = (max_tiles, tile, num_kv_heads, group)
    results = (jnp.zeros((*shape, head_size), q_tnh.dtype),)
    if return_lse:
        results += (jnp.zeros(shape, dtype),)
    num_blocks = (plan.count + block - 1) // block
    results = lax.fori_loop(0, num_blocks, one_block, vary_like(results, *inputs))
    place_t = _place_of_token(query_lens, starts, rank, num_tokens, tile)
    out_tnh, *lse_tn = (
        x.reshape(max_tiles * tile, num_heads, *x.shape[4:]).at[place_t].get(mode="clip")
        for x in results
    )
    return (out_tnh, lse_tn[0]) if return_lse else out_tnh


def _sorted_by(keys: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The rank [n] of each key, and the indices [n] of the keys in ascending order. Equal keys keep theirs."""
    index = jnp.arange(len(keys), dtype=jnp.int32)
    before = (keys < keys[:, None]) | ((keys == keys[:, None]) & (index < index[:, None]))
    rank = before.sum(axis=1, dtype=jnp.int32)
    return rank, jnp.where(rank == index[:, None], index, 0).sum(axis=1, dtype=jnp.int32)


def _place_of_token(
    query_lens: jax.Array, starts: jax.Array, rank: jax.Array, num_tokens: int, tile: int
) -> jax.Array:
    """Where each token's result lies among those of the tiles [T], given the `rank` of each tile of the plan."""
    tiles_r = (query_lens + tile - 1) // tile
    first_tile_r = jnp.cumsum(tiles_r) - tiles_r
    token = jnp.arange(num_tokens, dtype=jnp.int32)
    row = jnp.sum(starts[1:] <= token[:, None], axis=1, dtype=jnp.int32)
    offset = token - starts[row]
    return rank.at[first_tile_r[row] + offset // tile].get(mode="clip") * tile + offset % tile
