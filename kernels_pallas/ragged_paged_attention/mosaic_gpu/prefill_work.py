"""What a thread block of the prefill kernel works on: its share of the planned tiles, turn after turn."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from kernels_pallas.ragged_paged_attention.mosaic_gpu.config import PrefillConfig
from kernels_pallas.ragged_paged_attention.mosaic_gpu.decode_shape import DecodeShape
from kernels_pallas.ragged_paged_attention.mosaic_gpu.tiles import alignment


@dataclass(frozen=True, slots=True)
class Problem:
    """What is known when the kernel is compiled."""

    config: PrefillConfig
    cores: int
    """Thread blocks in the grid."""
    num_heads: int
    num_kv_heads: int
    heads: int
    """Query heads of a tile."""
    share: int
    """Query tokens of a consumer: a power of two."""
    page_size: int
    dtype: Any
    """Of the matmuls' operands."""
    narrow: bool
    """The cache has 8 bits."""
    scale: float
    sliding_window: int | None
    soft_cap: float | None
    causal: bool
    interpret: Any
    decoded: DecodeShape | None
    """Of the requests that the decode kernel cut, which are completed here."""


class Tile(NamedTuple):
    """An item and a head tile. Scalars."""

    item: jax.Array
    head_tile: jax.Array
    row: jax.Array
    first_token: jax.Array
    num_tokens: jax.Array
    position: jax.Array
    """Of the first token in its request."""
    first_head: jax.Array
    kv_head: jax.Array
    seq_len: jax.Array
    end: jax.Array
    """One past the last position that some token sees."""
    begin: jax.Array
    """Where the first block does, at or before the first position that some token sees."""
    num_blocks: jax.Array


class Turns:
    """The tiles of this thread block: one of each run of `cores` tiles, back and forth, as the plan sorts them by cost."""

    def __init__(self, refs: SimpleNamespace, problem: Problem):
        self._refs, self._problem = refs, problem
        self._head_tiles = problem.num_heads // problem.heads
        num_tiles = refs.num_items[0] * self._head_tiles
        cores = jnp.int32(problem.cores)
        whole = lax.div(num_tiles, cores)
        self.count = whole + (self._place(whole) < lax.rem(num_tiles, cores)).astype(jnp.int32)

    def _place(self, turn: jax.Array) -> jax.Array:
        core = lax.axis_index("core")
        return jnp.where(turn & 1 == 0, core, self._problem.cores - 1 - core)

    def tile(self, turn: jax.Array) -> Tile:
        problem, refs = self._problem, self._refs
        index = turn * problem.cores + self._place(turn)
        item = lax.div(index, jnp.int32(self._head_tiles))
        head_tile = index - item * self._head_tiles
        row, first_token, num_tokens, position = (refs.items[item, i] for i in range(4))
        seq_len = refs.lens[row]
        end = position + num_tokens if problem.causal else seq_len
        block, seen_from = problem.config.block_tokens, jnp.int32(0)
        if problem.sliding_window is not None:
            seen_from = jnp.maximum(position - problem.sliding_window + 1, 0)
        begin = seen_from & -alignment(problem.page_size, block)
        tiles_per_kv_head = self._head_tiles // problem.num_kv_heads
        num_blocks = lax.div(end - begin + (block - 1), jnp.int32(block))
        if not problem.causal:
            # Of an empty context, a block that nobody sees.
            num_blocks = jnp.maximum(num_blocks, 1)
        return Tile(
            item,
            head_tile,
            row,
            first_token,
            num_tokens,
            position,
            first_head=head_tile * problem.heads,
            kv_head=lax.div(head_tile, jnp.int32(tiles_per_kv_head)),
            seq_len=seq_len,
            end=end,
            begin=begin,
            num_blocks=num_blocks,
        )
