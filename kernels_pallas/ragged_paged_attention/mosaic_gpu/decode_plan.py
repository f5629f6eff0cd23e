"""Who does what in the decode kernel: an equal share of all key blocks for each thread block, cut on the device.

The blocks of all requests, kv head after kv head, lie on one line, each request's followed by `ITEM_COST` for starting
and ending it. Walk b goes from b * share to (b + 1) * share. A request that a border cuts is done in parts, by
neighbouring walks; any other is finished where it lies.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

ITEM_COST = 2
"""Blocks that could be loaded in the time in which a request's queries come and its result goes."""


class Row(NamedTuple):
    """One request's columns in `DecodePlan.rows`."""

    request: Any
    seq_len: Any
    first_token: Any
    num_tokens: Any
    begin: Any
    """Where its first block does, in the context."""
    num_blocks: Any
    start: Any
    """On the line of one kv head."""


class Walk(NamedTuple):
    """One thread block's columns in `DecodePlan.walks`."""

    head: Any
    """The first item's."""
    row: Any
    count: Any
    begin: Any
    end: Any
    length: Any
    """Of the line of one kv head, the same for all walks; so are the two that follow."""
    num_rows: Any
    share: Any


class DecodePlan(NamedTuple):
    rows: jax.Array
    """[R, 7] int32 by `Row`, the requests with tokens first."""
    walks: jax.Array
    """[walks, 8] int32 by `Walk`."""


class Item(NamedTuple):
    """A run of key blocks of one request and kv head, as the kernels see it."""

    row: Row
    head: jax.Array
    first_block: jax.Array
    """Of the request's."""
    num_blocks: jax.Array
    start: jax.Array
    """Of the request's blocks, on the whole line."""
    opens: jax.Array
    """The walk has the request's first block."""
    closes: jax.Array


def item_of(rows_ref: Any, walk: Walk, index: jax.Array) -> Item:
    """The walk's item with this index."""
    number = walk.row + index
    head = walk.head + lax.div(number, walk.num_rows)
    number = lax.rem(number, walk.num_rows)
    row = Row(*(rows_ref[number, i] for i in range(len(Row._fields))))
    start = head * walk.length + row.start
    zero = jnp.int32(0)
    first = lax.clamp(zero, walk.begin - start, row.num_blocks)
    last = lax.clamp(zero, walk.end - start, row.num_blocks)
    return Item(
        row,
        head,
        first,
        last - first,
        start,
        start >= walk.begin,
        last == row.num_blocks,
    )


def plan_decode(
    seq_lens: jax.Array,
    first_tokens: jax.Array,
    query_lens: jax.Array,
    *,
    block: int,
    alignment: int,
    sliding_window: int | None,
    num_kv_heads: int,
    num_walks: int,
    min_blocks: int,
) -> DecodePlan:
    """Cut the contexts into `num_walks` equal shares.

    Args:
        seq_lens: [R] int32; a request with 0 gets an item without blocks.
        first_tokens: [R] int32, where its query tokens begin.
        query_lens: [R] int32; a request with 0 gets no item.
        block: tokens per block.
        alignment: blocks begin at a multiple of it, a power of two.
        sliding_window: the first block begins as close before the window of a request's first token.
        min_blocks: no share is smaller, but for the last one.
    """
    num_requests = seq_lens.shape[0]
    taken = jnp.cumsum(query_lens > 0, dtype=jnp.int32)
    num_rows = taken[-1]
    index = jnp.arange(num_requests, dtype=jnp.int32)
    request = jnp.sum(taken[None, :] <= index[:, None], axis=1, dtype=jnp.int32)
    request = jnp.minimum(request, num_requests - 1)
    in_use = index < num_rows
    seq_len, num_tokens = seq_lens[request], query_lens[request]
    begin = jnp.zeros_like(seq_len)
    if sliding_window is not None:
        begin = jnp.maximum(seq_len - num_tokens + 1 - sliding_window, 0) & -alignment
    num_blocks = jnp.where(in_use, (seq_len - begin + block - 1) // block, 0)
    cost = jnp.where(in_use, num_blocks + ITEM_COST, 0)
    ends = jnp.cumsum(cost, dtype=jnp.int32)
    start, length = ends - cost, ends[-1]
    rows = Row(request, seq_len, first_tokens[request], num_tokens, begin, num_blocks, start)
    total = length * num_kv_heads
    share = jnp.maximum(-(-total // num_walks), min_blocks + ITEM_COST)
    border = jnp.minimum(jnp.arange(num_walks + 1, dtype=jnp.int32) * share, total)
    head = border // jnp.maximum(length, 1)
    offset = border - head * length
    row = jnp.sum(ends[None, :] <= offset[:, None], axis=1, dtype=jnp.int32)
    row = jnp.minimum(row, num_requests - 1)
    inside = offset - start[row]
    item = head * num_rows + row
    # A border behind a request's last block leaves nothing of it to the next walk.
    first = item + ((inside > 0) & (inside >= num_blocks[row]))
    count = jnp.maximum((item + (inside > 0))[1:] - first[:-1], 0)
    first_head = first // jnp.maximum(num_rows, 1)
    walks = Walk(
        first_head[:-1],
        (first - first_head * num_rows)[:-1],
        count,
        border[:-1],
        border[1:],
        *(jnp.broadcast_to(x, (num_walks,)) for x in (length, num_rows, share)),
    )
    return DecodePlan(
        jnp.stack(rows, axis=1).astype(jnp.int32), jnp.stack(walks, axis=1).astype(jnp.int32)
    )
