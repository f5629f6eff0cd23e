"""Which blocks of the KV cache each row holds: allocation as its tokens grow, for all rows at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from jaxinfer.engine.block_pool import BlockPool
from jaxinfer.engine.plan import Int32

_NONE = np.empty(0, np.int32)


class TableEntries(NamedTuple):
    """U new entries of the block tables: row `rows[u]` holds `blocks[u]` at column `cols[u]`. With G groups `blocks` is
    [G, U], 0 where the row has fallen out of the group's window."""

    rows: Int32
    cols: Int32
    blocks: Int32

    @classmethod
    def join(cls, parts: Sequence[TableEntries]) -> TableEntries:
        parts = [part for part in parts if part.rows.size]
        if len(parts) > 1:
            rows, cols, blocks = zip(*parts, strict=True)
            return cls(np.concatenate(rows), np.concatenate(cols), np.concatenate(blocks, axis=-1))
        return parts[0] if parts else NO_ENTRIES


NO_ENTRIES = TableEntries(_NONE, _NONE, _NONE)


class CachedPrefix(NamedTuple):
    """What the cache holds of a request's first `num_blocks` columns: of each group the last `len(blocks[g])` of them,
    which are all that its window needs."""

    num_blocks: int
    blocks: list[list[int]]

    @property
    def all_blocks(self) -> list[int]:
        return [block for blocks in self.blocks for block in blocks]


class _WindowGroups(NamedTuple):
    """Groups that look back by the same window. Row s holds blocks of theirs from column `first[s]` on."""

    window: int
    groups: npt.NDArray[np.int64]
    first: Int32


class KVCacheManager:
    """Block tables by row, one for each group of layers. `block_tables[g, s, c]` is what row s holds of group g at column
    c, for `block_size` tokens, up to column `num_blocks[s]`; 0: what it held there fell out of the group's window.

    `windows[g]` is how far group g looks back (None: at all tokens). A block is one group's, whichever takes it.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        num_rows: int,
        max_blocks_per_row: int,
        windows: Sequence[int | None] = (None,),
    ) -> None:
        self.pool = BlockPool(num_blocks)
        self.block_size = block_size
        self.windows = tuple(windows)
        self.block_tables = np.zeros((len(windows), num_rows, max_blocks_per_row), np.int32)
        self.block_table = self.block_tables[0]
        self.num_blocks = np.zeros(num_rows, np.int32)
        self._windowed = [
            _WindowGroups(
                window,
                np.flatnonzero([w == window for w in self.windows]),
                np.zeros(num_rows, np.int32),
            )
            for window in sorted({w for w in self.windows if w is not None})
        ]
        first_of = {windowed.window: windowed.first for windowed in self._windowed}
        self._first = [None if w is None else first_of[w] for w in self.windows]

    @property
    def num_groups(self) -> int:
        """How many blocks a new column takes."""
        return len(self.windows)

    @property
    def has_windows(self) -> bool:
        return bool(self._windowed)

    def blocks_for(self, num_tokens: Int32) -> Int32:
        """How many blocks of a group hold this many tokens, elementwise."""
        return (num_tokens + (self.block_size - 1)) // self.block_size

    def missing(self, rows: Int32, num_tokens: Int32) -> Int32:
        """How many more columns each of `rows` [R] needs to hold `num_tokens` [R] tokens in all; 0 or less: none."""
        return self.blocks_for(num_tokens) - self.num_blocks[rows]

    def first_columns(self, group: int, rows: Int32) -> Int32:
        """The first column of which each of `rows` [R] holds a block of the group."""
        first = self._first[group]
        return np.zeros(len(rows), np.int32) if first is None else first[rows]

    def first_column(self, group: int, row: int) -> int:
        first = self._first[group]
        return 0 if first is None else int(first[row])

    def grow(self, rows: Int32, missing: Int32) -> TableEntries:
        """Give `missing[r]` more columns to each of `rows` [R] (distinct). Raises `RuntimeError` when the pool has too
        few blocks."""
        growing = np.flatnonzero(missing > 0)
        if not growing.size:
            return NO_ENTRIES
        rows, missing = rows[growing], missing[growing]
        total = int(missing.sum())
        block_ids = np.array(self.pool.allocate(total * self.num_groups), np.int32)
        if self.num_groups > 1:
            block_ids = block_ids.reshape(self.num_groups, total)
        block_rows, block_cols = _columns(rows, self.num_blocks[rows], missing)
        self.block_tables[:, block_rows, block_cols] = block_ids
        self.num_blocks[rows] += missing
        return TableEntries(block_rows, block_cols, block_ids)

    def start(self, row: int, cached: CachedPrefix, num_tokens: int) -> TableEntries:
        """Give a row that holds nothing the blocks that are `cached`, which others may hold too, and after them as many
        columns of its own as `num_tokens` tokens need in all."""
        for block in cached.all_blocks:
            self.pool.share(block)
        num_cached = cached.num_blocks
        total = -(-num_tokens // self.block_size)
        new = self.pool.allocate((total - num_cached) * self.num_groups)
        blocks = np.zeros((self.num_groups, total), np.int32)
        blocks[:, num_cached:] = np.array(new, np.int32).reshape(self.num_groups, -1)
        for of_group, found in zip(blocks, cached.blocks, strict=True):
            of_group[num_cached - len(found) : num_cached] = found
        for windowed in self._windowed:
            windowed.first[row] = num_cached - len(cached.blocks[windowed.groups[0]])
        self.block_tables[:, row, :total] = blocks
        self.num_blocks[row] = total
        cols = np.arange(total, dtype=np.int32)
        block_ids = blocks if self.num_groups > 1 else blocks[0]
        return TableEntries(np.full(total, row, np.int32), cols, block_ids)

    def fallen(self, rows: Int32, num_computed: Int32) -> Int32:
        """Those of `rows` [R] that hold blocks which no token after their first `num_computed` [R] looks back at."""
        due = np.zeros(len(rows), np.bool_)
        for windowed in self._windowed:
            due |= self._first_needed(windowed.window, num_computed) > windowed.first[rows]
        return rows[due]

    def free_fallen(self, rows: Int32, num_computed: Int32) -> None:
        """Give back these blocks, those longest out of the window first."""
        for windowed in self._windowed:
            needed = self._first_needed(windowed.window, num_computed)
            before = windowed.first[rows]
            counts = np.maximum(needed - before, 0)
            block_rows, block_cols = _columns(rows, before, counts)
            index = windowed.groups[:, None], block_rows, block_cols
            self.pool.free(self.block_tables[index].T.ravel().tolist())
            self.block_tables[index] = 0
            windowed.first[rows] = before + counts

    def free(self, row: int) -> int:
        """Give back a row's blocks, those of the last column first: the start of a sequence is worth keeping longest.
        Returns how many of them nobody else holds."""
        num_free = self.pool.num_free
        held = self.block_tables[:, row, : self.num_blocks[row]][:, ::-1].T.ravel()
        self.pool.free((held[held > 0] if self._windowed else held).tolist())
        self.num_blocks[row] = 0
        return self.pool.num_free - num_free

    def _first_needed(self, window: int, num_computed: Int32) -> Int32:
        return np.maximum(num_computed - (window - 1), 0) // self.block_size


def _columns(rows: Int32, first: Int32, counts: Int32) -> tuple[Int32, Int32]:
    """The columns `first[r]` … `first[r]` + `counts[r]` - 1 of each row, as (row, column) pairs."""
    total = int(counts.sum())
    if total == len(rows) and (counts == 1).all():
        return rows, first
    ends = np.cumsum(counts)
    cols = np.arange(total) + np.repeat(first - (ends - counts), counts)
    return np.repeat(rows, counts), cols.astype(np.int32)
