"""Running rows that hold the same first blocks, in groups, so that the device may attend to these once for all of them.

What two rows share is settled when the later of them is admitted: from then on both only add blocks of their own. So
a batch of the same rows has the same groups, and the work is done when rows come or go.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np

from jaxinfer.config import CascadeConfig
from jaxinfer.engine.kv_cache_manager import KVCacheManager
from jaxinfer.engine.plan import MAX_PREFIX_GROUPS, Bool, Int32, PrefixGroups
from jaxinfer.engine.row_table import RowTable
from jaxinfer.engine.scheduled_step import Batch, Index

_MAX_LEVELS = 8
"""Of groups within groups that are compared: it bounds the work for beginnings that branch row by row."""


class PrefixOrder:
    """Running rows in an order in which those that share their first blocks are neighbours.

    `shared[i]` is how many first blocks `rows[i]` has in common with `rows[i - 1]`, 0 for the first row. Neighbours
    with fewer than `min_blocks` in common count as sharing nothing.
    """

    def __init__(self, kv: KVCacheManager, min_blocks: int) -> None:
        self._kv = kv
        self._min_blocks = min_blocks
        # Of all that can run; the first `_length` entries count.
        self._rows = np.zeros(len(kv.num_blocks), np.int32)
        self._shared = np.zeros(len(kv.num_blocks), np.int32)
        self._length = 0

    @property
    def rows(self) -> Int32:
        return self._rows[: self._length]

    @property
    def shared(self) -> Int32:
        return self._shared[: self._length]

    def add(self, row: int, num_found: int) -> None:
        """Take in a row that has its blocks, the first `num_found` of which others may hold too."""
        position, shared = self._length, 0
        if num_found >= self._min_blocks:
            position, shared = self._place(row, num_found)
        for array, value in ((self._rows, row), (self._shared, shared)):
            array[position + 1 : self._length + 1] = array[position : self._length]
            array[position] = value
        self._length += 1

    def remove(self, rows: Collection[int]) -> None:
        keep = np.ones(len(self._rows), np.bool_)
        keep[list(rows)] = False
        left, shared = self.restricted(keep[self.rows])
        self._length = len(left)
        self._rows[: self._length] = left
        self._shared[: self._length] = shared

    def restricted(self, keep: Bool) -> tuple[Int32, Int32]:
        """Rows and what they share with the one before, of those for which `keep` [n] is true only."""
        kept = np.flatnonzero(keep)
        if len(kept) == len(self.rows) or not len(kept):
            return self.rows[kept], self.shared[kept]
        # Two rows share what all neighbours between them share.
        starts = np.concatenate([[0], kept[:-1] + 1])
        shared = np.minimum.reduceat(self.shared[: kept[-1] + 1], starts)
        shared[0] = 0
        return self.rows[kept], shared

    def _place(self, row: int, num_found: int) -> tuple[int, int]:
        """Where the row goes, and how many blocks it shares with the one that will be before it."""
        table, num_blocks = self._kv.block_table, self._kv.num_blocks
        own = table[row, :num_found]
        low, high = self._min_blocks, num_found
        candidates = self._holders(self.rows, own, low)
        if not len(candidates):
            return len(self.rows), 0
        while low < high:
            middle = (low + high + 1) // 2
            deeper = self._holders(candidates, own, middle)
            if len(deeper):
                candidates, low = deeper, middle
            else:
                high = middle - 1
        neighbour = candidates[-1]
        length = min(num_found, int(num_blocks[neighbour]))
        differing = np.flatnonzero(table[neighbour, :length] != own[:length])
        shared = int(differing[0]) if len(differing) else length
        if shared < self._min_blocks:
            return len(self.rows), 0
        # Past those that share more with the neighbour than this row does.
        position = int(np.flatnonzero(self.rows == neighbour)[0]) + 1
        fewer = np.flatnonzero(self.shared[position:] <= shared)
        return (position + int(fewer[0]) if len(fewer) else len(self.rows)), shared

    def _holders(self, rows: Int32, own: Int32, count: int) -> Int32:
        """Those of `rows` whose block number `count` is that of `own`: mostly, all blocks before it are as well."""
        same = self._kv.block_table[rows, count - 1] == own[count - 1]
        # Entries past a row's last block are what an earlier request left there.
        holders: Int32 = rows[same & (self._kv.num_blocks[rows] >= count)]
        return holders


class Group(NamedTuple):
    """Rows of an order, by their positions, that share their first `num_blocks` blocks."""

    members: Index
    num_blocks: int


def _saved(groups: Sequence[Group]) -> int:
    """Blocks that needn't be read when each group reads what it shares once."""
    return sum((len(group.members) - 1) * group.num_blocks for group in groups)


def best_groups(shared: Int32, min_rows: int, min_blocks: int) -> list[Group]:
    """Disjoint groups of at least `min_rows` rows that share `min_blocks` blocks or more, and save much: at most
    `MAX_PREFIX_GROUPS`, those that save most first. `shared` as in `PrefixOrder`."""

    def best(levels: int) -> list[Group]:
        parts = _parts(shared, 0, len(shared), min_blocks - 1, min_rows, levels)
        groups = [group for part in parts for group in part.groups]
        groups.sort(key=lambda group: -_saved([group]))
        return groups[:MAX_PREFIX_GROUPS]

    # When there are more groups than may be, larger ones that share less can be worth more.
    return max(best(_MAX_LEVELS), best(0), key=_saved)


class _Part(NamedTuple):
    """Rows [start, stop) of an order and the best groups among them."""

    start: int
    stop: int
    groups: list[Group]


def _parts(
    shared: Int32, start: int, stop: int, at_most: int, min_rows: int, levels: int
) -> list[_Part]:
    """[start, stop) cut where neighbours share `at_most` blocks or fewer; parts of fewer than `min_rows` are left
    out."""
    cuts = np.flatnonzero(shared[start + 1 : stop] <= at_most) + (start + 1)
    starts = np.concatenate([[start], cuts])
    stops = np.concatenate([cuts, [stop]])
    large = stops - starts >= min_rows
    return [
        _Part(first, last, _groups_within(shared, first, last, min_rows, levels))
        for first, last in zip(starts[large].tolist(), stops[large].tolist(), strict=True)
    ]


def _groups_within(shared: Int32, start: int, stop: int, min_rows: int, levels: int) -> list[Group]:
    """All rows as one group, or groups that share more; the rows between those may form a group too."""
    num_blocks = int(shared[start + 1 : stop].min())
    whole = [Group(np.arange(start, stop), num_blocks)]
    if not levels:
        return whole
    parts = _parts(shared, start, stop, num_blocks, min_rows, levels - 1)
    options = [whole, [group for part in parts for group in part.groups]]
    apart = [
        group
        for part in parts
        if _saved(part.groups) > (part.stop - part.start) * num_blocks
        for group in part.groups
    ]
    rest = np.ones(stop - start, np.bool_)
    for group in apart:
        rest[group.members - start] = False
    if np.count_nonzero(rest) >= min_rows:
        options.append([Group(np.flatnonzero(rest) + start, num_blocks), *apart])
    return max(options, key=_saved)


class PrefixGrouping:
    """Finds the groups of a batch of rows that decode, as far as `config` thinks them worth it."""

    def __init__(self, config: CascadeConfig, kv: KVCacheManager, table: RowTable) -> None:
        self._min_rows = config.min_rows
        self._min_blocks = max(-(-config.min_tokens // kv.block_size), 1)
        # Of a beginning that falls out of a window, each row sees another piece, or nothing.
        self._enabled = config.enabled and kv.windows[0] is None
        self._kv = kv
        self._table = table
        self._order = PrefixOrder(kv, self._min_blocks)
        self._last: tuple[Batch, tuple[Batch, PrefixGroups | None]] | None = None

    def admit(self, row: int, num_found: int) -> None:
        """The row has its blocks; the first `num_found` were in the cache."""
        if self._enabled:
            self._order.add(row, num_found)

    def release(self, rows: Collection[int]) -> None:
        if self._enabled:
            self._order.remove(rows)

    def arrange(self, batch: Batch) -> tuple[Batch, PrefixGroups | None]:
        """The batch with its groups at its beginning, or the batch itself and None. For the same batch, the same
        objects as before."""
        if not self._enabled or len(batch.rows) < self._min_rows:
            return batch, None
        if self._last is None or self._last[0] is not batch:
            self._last = batch, self._arranged(batch)
        return self._last[1]

    def _arranged(self, batch: Batch) -> tuple[Batch, PrefixGroups | None]:
        position = np.full(len(self._kv.num_blocks), -1, np.int64)
        position[batch.rows] = np.arange(len(batch.rows))
        order, shared = self._order.restricted(position[self._order.rows] >= 0)
        groups = []
        for positions, shared_blocks in best_groups(shared, self._min_rows, self._min_blocks):
            members = order[positions]
            # A row that fills the last shared block in this very step still has its token to compute.
            computed = int(self._table.num_computed[members].min())
            num_blocks = min(shared_blocks, computed // self._kv.block_size)
            if num_blocks >= self._min_blocks:
                groups.append((members, num_blocks))
        if not groups:
            return batch, None
        grouped = position[np.concatenate([members for members, _ in groups])]
        alone = np.ones(len(batch.rows), np.bool_)
        alone[grouped] = False
        index = np.concatenate([grouped, np.flatnonzero(alone)])
        return batch.take(index), PrefixGroups(
            np.array([len(members) for members, _ in groups], np.int32),
            np.array([num_blocks for _, num_blocks in groups], np.int32),
        )
