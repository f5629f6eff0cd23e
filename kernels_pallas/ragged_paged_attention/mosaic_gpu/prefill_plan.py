"""Who does what: the tiles of the Mosaic GPU prefill kernel, computed on the device from the lengths of a step."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp


class PrefillPlan(NamedTuple):
    """Tiles of consecutive query tokens of one request each, those with the most keys first."""

    items: jax.Array
    """[I, 4] int32: request, first token, number of tokens (0 past the last item), position of the first."""
    count: jax.Array
    """[1] int32, the number of items."""
    rank: jax.Array
    """[I] int32: where the items are that were, in the tokens' order, item 0, 1, ..."""
    begins: jax.Array
    """[R] int32: each request's first item in the tokens' order."""


def max_prefill_items(num_tokens: int, num_rows: int, tile: int) -> int:
    """Whole tiles and one rest per request that has tokens."""
    return num_tokens // tile + min(num_rows, num_tokens)


def cut_tiles(
    query_lens: jax.Array,
    query_start_loc: jax.Array,
    seq_lens: jax.Array,
    tile: int,
    max_items: int,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The requests' tokens in tiles, in the tokens' order.

    Args:
        query_lens: [R] int32, 0 for requests that are left out.
        tile: tokens per item, at most.

    Returns:
        Items [I, 4] as in `PrefillPlan`, how many there are [1], and each request's first [R].
    """
    tiles_per_row = (query_lens + tile - 1) // tile
    ends = jnp.cumsum(tiles_per_row, dtype=jnp.int32)
    begins = ends - tiles_per_row
    item = jnp.arange(max_items, dtype=jnp.int32)
    row = jnp.sum(ends[None, :] <= item[:, None], axis=1, dtype=jnp.int32)
    in_use = row < query_lens.shape[0]
    row = jnp.minimum(row, query_lens.shape[0] - 1)
    offset = (item - begins[row]) * tile
    tokens = jnp.where(in_use, jnp.clip(query_lens[row] - offset, 0, tile), 0)
    position = seq_lens[row] - query_lens[row] + offset
    items = jnp.stack([row, query_start_loc[row] + offset, tokens, position], axis=1)
    return items.astype(jnp.int32), ends[-1:], begins.astype(jnp.int32)


def plan_prefill(
    query_lens: jax.Array,
    query_start_loc: jax.Array,
    seq_lens: jax.Array,
    *,
    tile: int,
    max_items: int,
    block: int,
    alignment: int,
    causal: bool = True,
    sliding_window: int | None = None,
) -> PrefillPlan:
    """Cut the requests' tokens into tiles and sort those by their number of key blocks.

    Args:
        query_lens: [R] int32, 0 for requests that are left out.
        tile: tokens per item, at most.
        block: keys per block.
        alignment: blocks begin at a multiple of it, a power of two, the first one as close before the window.
    """
    items, count, begins = cut_tiles(query_lens, query_start_loc, seq_lens, tile, max_items)
    row, _, tokens, position = items.T
    end = position + tokens if causal else seq_lens[row]
    if sliding_window is not None:
        end -= jnp.maximum(position - sliding_window + 1, 0) & -alignment
    blocks = (end + block - 1) // block
    order = jnp.argsort(jnp.where(tokens > 0, -blocks, 1), stable=True)
    rank = jnp.zeros_like(order).at[order].set(jnp.arange(max_items, dtype=order.dtype))
    return PrefillPlan(items[order], count, rank, begins)
