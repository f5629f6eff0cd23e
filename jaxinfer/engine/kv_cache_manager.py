"""Which blocks of the KV cache each row holds: allocation as its tokens grow, for all rows at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jaxinfer.engine.block_pool import BlockPool
from jaxinfer.engine.plan import Int32

_NONE = np.empty(0, np.int32)


class TableEntries(NamedTuple):
    """U new entries of the block tables: row `rows[u]` holds `blocks[u]` at `cols[u]`."""

    rows: Int32
    cols: Int32
    blocks: Int32

    @classmethod
    def join(cls, parts: Sequence[TableEntries]) -> TableEntries:
        parts = [part for part in parts if part.rows.size]
        if len(parts) == 1:
            return parts[0]
        return cls(*map(np.concatenate, zip(*parts, strict=True))) if parts else NO_ENTRIES


NO_ENTRIES = TableEntries(_NONE, _NONE, _NONE)


class KVCacheManager:
    """Block tables by row. `block_table[s, :num_blocks[s]]` are the blocks that row s holds, in token order."""

    def __init__(
        self, num_blocks: int, block_size: int, num_rows: int, max_blocks_per_row: int
    ) -> None:
        self.pool = BlockPool(num_blocks)
        self.block_size = block_size
        self.block_table = np.zeros((num_rows, max_blocks_per_row), np.int32)
        self.num_blocks = np.zeros(num_rows, np.int32)

    def blocks_for(self, num_tokens: Int32) -> Int32:
        """How many blocks hold this many tokens, elementwise."""
        return (num_tokens + (self.block_size - 1)) // self.block_size

    def missing(self, rows: Int32, num_tokens: Int32) -> Int32:
        """How many more blocks each of `rows` [R] needs to hold `num_tokens` [R] tokens in all; 0 or less: none."""
        return self.blocks_for(num_tokens) - self.num_blocks[rows]

    def grow(self, rows: Int32, missing: Int32) -> TableEntries:
        """Give `missing[r]` more blocks to each of `rows` [R] (distinct). Raises `RuntimeError` when the pool has too
        few."""
        growing = np.flatnonzero(missing > 0)
        if not growing.size:
            return NO_ENTRIES
        rows, missing = rows[growing], missing[growing]
        ends = np.cumsum(missing)
        total = int(ends[-1])
        block_ids = np.array(self.pool.allocate(total), np.int32)
        if total == len(rows):
            block_rows, block_cols = rows, self.num_blocks[rows]
        else:
            block_rows = np.repeat(rows, missing)
            first = self.num_blocks[rows] - (ends - missing)
            block_cols = (np.arange(total) + np.repeat(first, missing)).astype(np.int32)
        self.block_table[block_rows, block_cols] = block_ids
        self.num_blocks[rows] += missing
        return TableEntries(block_rows, block_cols, block_ids)

    def start(self, row: int, shared: Sequence[int], num_tokens: int) -> TableEntries:
        """Give a row that holds nothing the blocks `shared`, which others may hold too, and after them as many of its
        own as `num_tokens` tokens need in all."""
        for block in shared:
            self.pool.share(block)
        missing = -(-num_tokens // self.block_size) - len(shared)
        blocks = np.array([*shared, *self.pool.allocate(missing)], np.int32)
        self.block_table[row, : len(blocks)] = blocks
        self.num_blocks[row] = len(blocks)
        cols = np.arange(len(blocks), dtype=np.int32)
        return TableEntries(np.full(len(blocks), row, np.int32), cols, blocks)

    def free(self, row: int) -> int:
        """Give back a row's blocks, the last one first: the start of a sequence is worth keeping longest. Returns
        how many of them nobody else holds."""
        num_free = self.pool.num_free
        self.pool.free(self.block_table[row, : self.num_blocks[row]][::-1].tolist())
        self.num_blocks[row] = 0
        return self.pool.num_free - num_free
