"""Attention of requests with any number of tokens each: query tiles against chunks of keys."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

_MASKED = -1e30


class TilePlan(NamedTuple):
    """Query tiles in token order. count: number of tiles in use; the others repeat the last row."""

    count: jax.Array
    row: jax.Array
    first_token: jax.Array


def plan_tiles(query_lens: jax.Array, starts: jax.Array, tile: int, max_tiles: int) -> TilePlan:
    """Cuts each request's query_lens[r] tokens, which begin at starts[r], into tiles."""
    tiles_r = (query_lens + tile - 1) // tile
    ends_r = jnp.cumsum(tiles_r)
    index = jnp.arange(max_tiles, dtype=jnp.int32)
    row = jnp.searchsorted(ends_r, index, side="right", method="compare_all").astype(jnp.int32)
    row = jnp.minimum(row, query_lens.shape[0] - 1)
    first_token = starts[row] + (index - (ends_r - tiles_r)[row]) * tile
    return TilePlan(ends_r[-1], row, first_token)


def prefill_attention(
    q_tnh: jax.Array,
    kv_pages: tuple[jax.Array, jax.Array],
    block_tables: jax.Array,
    seq_lens: jax.Array,
    query_start_loc: jax.Array,
    *,
    scale: float,
    sliding_window: int | None,
    soft_cap: float | None,
    tile: int = 128,
    chunk: int = 128,
) -> jax.Array:
    """q [T, N, H] -> [T, N, H]; tokens of no request give zeros."""
    k_pages, v_pages = kv_pages
    _, num_kv_heads, page_size, head_size = k_pages.shape
    num_tokens, num_heads, _ = q_tnh.shape
    num_rows, pages_per_row = block_tables.shape
    group = num_heads // num_kv_heads
    tile = min(tile, num_tokens)
    chunk_pages = min(max(chunk // page_size, 1), pages_per_row)
    chunk = chunk_pages * page_size
    block_tables = jnp.pad(block_tables, ((0, 0), (0, -pages_per_row % chunk_pages)))
    starts, ends = query_start_loc[:-1], query_start_loc[1:]
    plan = plan_tiles(ends - starts, starts, tile, -(-num_tokens // tile) + num_rows)
    q_tkgh = jnp.pad(q_tnh, ((0, tile), (0, 0), (0, 0))).reshape(-1, num_kv_heads, group, head_size)

    def one_tile(index, out):
        row, first = plan.row[index], plan.first_token[index]
        q_kigh = lax.dynamic_slice_in_dim(q_tkgh, first, tile).transpose(1, 0, 2, 3)
        q_kmh = q_kigh.reshape(num_kv_heads, tile * group, head_size)
        # Position in the request of the tile's first token, and one past that of its last.
        position_first = seq_lens[row] - ends[row] + first
        position_end = jnp.minimum(position_first + tile, seq_lens[row])
        position_m = position_first + jnp.arange(tile * group)[:, None] // group
        begin = 0
        if sliding_window is not None:
            begin = jnp.maximum(position_first - sliding_window + 1, 0) // chunk

        def one_chunk(c, carry):
            peak, total, acc = carry
            pages = lax.dynamic_slice(block_tables, (row, c * chunk_pages), (1, chunk_pages))[0]
            k_kjh = k_pages.at[pages].get(mode="promise_in_bounds").transpose(1, 0, 2, 3)
            v_kjh = v_pages.at[pages].get(mode="promise_in_bounds").transpose(1, 0, 2, 3)
            k_kjh = k_kjh.reshape(num_kv_heads, chunk, head_size)
            v_kjh = v_kjh.reshape(num_kv_heads, chunk, head_size)
            scores = scale * jnp.einsum(
                "kmh,kjh->kmj", q_kmh, k_kjh, preferred_element_type=jnp.float32
            )
            if soft_cap is not None:
                scores = soft_cap * jnp.tanh(scores / soft_cap)
            position_j = c * chunk + jnp.arange(chunk)
            seen = position_j[None, :] <= position_m
            if sliding_window is not None:
                seen &= position_j[None, :] > position_m - sliding_window
            scores = jnp.where(seen, scores, _MASKED)
            new_peak = jnp.maximum(peak, scores.max(axis=-1, keepdims=True))
            weights = jnp.where(seen, jnp.exp(scores - new_peak), 0.0)
            fade = jnp.exp(peak - new_peak)
            v_kjh = jnp.where((position_j < position_end)[:, None], v_kjh, 0)
            o_kmh = jnp.einsum(
                "kmj,kjh->kmh",
                weights.astype(v_kjh.dtype),
                v_kjh,
                preferred_element_type=jnp.float32,
            )
            return new_peak, total * fade + weights.sum(-1, keepdims=True), acc * fade + o_kmh

        rows = (num_kv_heads, tile * group)
        carry = (
            jnp.full((*rows, 1), _MASKED, jnp.float32),
            jnp.zeros((*rows, 1), jnp.float32),
            jnp.zeros((*rows, head_size), jnp.float32),
        )
        _, total, acc = lax.fori_loop(begin, (position_end + chunk - 1) // chunk, one_chunk, carry)
        o_kigh = (acc / jnp.maximum(total, 1e-30)).reshape(num_kv_heads, tile, group, head_size)
        # Rows past the end of a tile's request are garbage and belong to tiles that come later.
        return lax.dynamic_update_slice_in_dim(
            out, o_kigh.transpose(1, 0, 2, 3).astype(out.dtype), first, 0
        )

    out = lax.fori_loop(0, plan.count, one_tile, jnp.zeros_like(q_tkgh))
    owned = jnp.arange(num_tokens) < query_start_loc[-1]
    out = out[:num_tokens].reshape(q_tnh.shape)
    return jnp.where(owned[:, None, None], out, 0)
