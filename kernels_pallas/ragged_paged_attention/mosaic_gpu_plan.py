"""Who does what: the work items of the Mosaic GPU kernels, computed on the device from the lengths of a step."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp


class DecodePlan(NamedTuple):
    """Runs of key blocks of one request each; the items of a request are neighbours."""

    items: jax.Array
    """[I, 3] int32: request, first block, number of blocks (0 past the last item)."""
    rows: jax.Array
    """[R, 2] int32: a request's first item and how many it has."""


def max_decode_items(num_rows: int, target: int) -> int:
    """Cutting into chunks of ceil(blocks / target) gives at most `target` whole chunks and one rest per request."""
    return num_rows + target


def plan_decode(
    seq_lens: jax.Array, block: int, sliding_window: int | None, target: int, min_blocks: int
) -> DecodePlan:
    """Cut the contexts into about `target` equal items, none shorter than `min_blocks` unless its request is.

    Args:
        seq_lens: [R] int32; a request with 0 gets no items.
        block: tokens per block.
        sliding_window: blocks wholly before the window are left out.
    """
    first_block = jnp.zeros_like(seq_lens)
    if sliding_window is not None:
        first_block = jnp.maximum(seq_lens - sliding_window, 0) // block
    num_blocks = (seq_lens + block - 1) // block - first_block
    chunk = jnp.maximum(-(-jnp.sum(num_blocks) // target), min_blocks)
    # A request's chunks are evened out: 9 blocks in chunks of 8 become 5 and 4.
    wanted = jnp.maximum(-(-num_blocks // chunk), 1)
    per_item = jnp.maximum(-(-num_blocks // wanted), 1)
    count = -(-num_blocks // per_item)
    ends = jnp.cumsum(count, dtype=jnp.int32)
    begins = ends - count
    item = jnp.arange(max_decode_items(seq_lens.shape[0], target), dtype=jnp.int32)
    row = jnp.sum(ends[None, :] <= item[:, None], axis=1, dtype=jnp.int32)
    in_use = row < seq_lens.shape[0]
    row = jnp.minimum(row, seq_lens.shape[0] - 1)
    offset = (item - begins[row]) * per_item[row]
    blocks = jnp.where(in_use, jnp.clip(num_blocks[row] - offset, 0, per_item[row]), 0)
    items = jnp.stack([row, first_block[row] + offset, blocks], axis=1)
    return DecodePlan(items.astype(jnp.int32), jnp.stack([begins, count], axis=1))


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


def plan_prefill(
    query_lens: jax.Array,
    query_start_loc: jax.Array,
    seq_lens: jax.Array,
    *,
    tile: int,
    max_items: int,
    block: int,
    causal: bool = True,
    sliding_window: int | None = None,
) -> PrefillPlan:
    """Cut the requests' tokens into tiles and sort those by their number of key blocks.

    Args:
        query_lens: [R] int32, 0 for requests that are left out.
        tile: tokens per item, at most.
        block: keys per block.
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
    end = position + tokens if causal else seq_lens[row]
    blocks = (end + block - 1) // block
    if sliding_window is not None:
        blocks -= jnp.maximum(position - sliding_window + 1, 0) // block
    order = jnp.argsort(jnp.where(tokens > 0, -blocks, 1), stable=True)
    items = jnp.stack([row, query_start_loc[row] + offset, tokens, position], axis=1)
    return PrefillPlan(
        items.astype(jnp.int32)[order],
        ends[-1:],
        jnp.zeros_like(item).at[order].set(item),
        begins.astype(jnp.int32),
    )
