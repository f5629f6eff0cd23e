"""From a step's plan to the flat arrays of its ragged batch, in numpy."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import numpy as np

from jaxinfer.engine.plan import AdmittedRow, ForcedTokens, StepPlan
from jaxinfer.executor.buckets import BucketLadder, StepShape
from kernels_pallas.ragged_paged_attention.check import check_batch

_ALIGNMENT = 64
"""Of the pieces of a packed vector, in int32s: the 256 bytes that Mosaic GPU asks of a kernel's operand. XLA hands a
kernel a slice where it lies in the vector."""

FROM_DEVICE = -1
"""Stands for a token that only the device knows yet: the one the row sampled last."""


@dataclass(frozen=True)
class PackedLayout:
    """Where each input of a step lies in the one int32 vector that carries them all to the device.

    One transfer a step instead of seven. The device side slices it at these static, aligned offsets. Each group of layers
    has slots and block tables of its own, see `table_names`. What engines with adapters add comes last.
    """

    shape: StepShape
    num_groups: int = 1
    has_adapters: bool = False

    @property
    def sizes(self) -> dict[str, int]:
        num_tokens, num_rows, num_pages, _, num_prefixes = self.shape
        sizes = {
            "token_ids": num_tokens,
            "positions": num_tokens,
            "slot_mapping": num_tokens,
            "query_start_loc": num_rows + 1,
            "seq_lens": num_rows,
            "rows": num_rows,
            "block_tables": num_rows * num_pages,
        }
        for group in range(1, self.num_groups):
            slots, tables = table_names(group)
            sizes |= {slots: num_tokens, tables: num_rows * num_pages}
        if num_prefixes:
            sizes["prefix_start_loc"] = num_prefixes + 1
            sizes["prefix_lens"] = num_prefixes
            sizes["prefix_tables"] = num_prefixes * num_pages
        if self.has_adapters:
            sizes["adapter_slots"] = num_tokens
        return sizes

    @property
    def size(self) -> int:
        return _aligned(_pieces(self)[-1].stop)

    def views(self, packed: np.ndarray) -> dict[str, np.ndarray]:
        """The named pieces of `packed` [size], as views (numpy) or slices (a traced array)."""
        views = {}
        for name, start, stop, is_table in _pieces(self):
            view = packed[start:stop]
            views[name] = view.reshape(-1, self.shape.num_pages) if is_table else view
        return views


class _Piece(NamedTuple):
    name: str
    start: int
    stop: int
    is_table: bool
    """[rows, num_pages]"""


@cache
def _pieces(layout: PackedLayout) -> tuple[_Piece, ...]:
    pieces, start = [], 0
    for name, size in layout.sizes.items():
        is_table = name.startswith(("block_tables", "prefix_tables"))
        pieces.append(_Piece(name, start, start + size, is_table))
        start += _aligned(size)
    return tuple(pieces)


@cache
def table_names(group: int) -> tuple[str, str]:
    """The inputs that say where a group of layers keeps the step's tokens: their slots, and the rows' block tables."""
    return (
        ("slot_mapping", "block_tables")
        if group == 0
        else (f"slots_{group}", f"block_tables_{group}")
    )


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


class InputBatch:
    """The executor's mirror of the scheduler's rows: each row's block tables, one per group of layers, and the tokens that
    the host knows.

    Row S (`num_rows`) belongs to nobody: padding reads and writes it. With `num_blocks`, the size of the pool, every
    batch is checked before it is handed over: about 10 µs for 256 rows.
    """

    def __init__(
        self,
        num_rows: int,
        max_pages: int,
        block_size: int,
        ladder: BucketLadder,
        num_blocks: int | None = None,
        num_groups: int = 1,
        has_adapters: bool = False,
    ):
        self.num_rows = num_rows
        self.block_size = block_size
        self.ladder = ladder
        self.num_blocks = num_blocks
        self.group_tables = np.zeros((num_groups, num_rows + 1, max_pages), np.int32)
        self.block_tables = self.group_tables[0]
        self.num_known = np.zeros(num_rows + 1, np.int32)
        self.admitted: list[AdmittedRow | None] = [None] * num_rows
        self.forced: dict[int, ForcedTokens] = {}
        self.adapter_slots = np.zeros(num_rows + 1, np.int32) if has_adapters else None

    def apply(self, plan: StepPlan) -> None:
        """Take over the plan's admissions, forced tokens and new block-table entries."""
        for row in plan.admitted:
            self.admitted[row.row] = row
            self.num_known[row.row] = len(row.token_ids)
            self.forced.pop(row.row, None)
            if self.adapter_slots is not None:
                self.adapter_slots[row.row] = row.adapter_slot
        for forced in plan.forced:
            self.forced[forced.row] = forced
            self.num_known[forced.row] = forced.start + len(forced.token_ids)
        if plan.block_ids.size:
            self.group_tables[:, plan.block_rows, plan.block_cols] = plan.block_ids

    def pack(self, plan: StepPlan) -> tuple[StepShape, np.ndarray]:
        """The step's shape and its packed inputs, an int32 vector laid out by `PackedLayout`.

        Padding tokens are token 0 at position 0, written to slot 0 of the padding block, and belong to no row;
        padding rows have `seq_lens` 0. Raises `ValueError` for a batch that reads past the pool, where that is checked.
        """
        num_rows = len(plan.rows)
        ends = np.cumsum(plan.num_scheduled)
        num_tokens = int(ends[-1])
        seq_lens = plan.num_computed + plan.num_scheduled
        num_pages = -(-int(seq_lens.max()) // self.block_size)
        shape = self.ladder.shape(
            num_tokens, num_rows, num_pages, grouped=plan.prefix_groups is not None
        )
        layout = PackedLayout(shape, len(self.group_tables), self.adapter_slots is not None)
        packed = np.zeros(layout.size, np.int32)
        to = layout.views(packed)

        if num_tokens == num_rows:
            positions = plan.num_computed
            token_rows = plan.rows
        else:
            index = np.repeat(np.arange(num_rows), plan.num_scheduled)
            first_token = ends - plan.num_scheduled
            positions = np.arange(num_tokens) + (plan.num_computed - first_token)[index]
            token_rows = plan.rows[index]
        to["positions"][:num_tokens] = positions
        if self.adapter_slots is not None:
            to["adapter_slots"][:num_tokens] = self.adapter_slots[token_rows]
        to["query_start_loc"][1 : num_rows + 1] = ends
        to["query_start_loc"][num_rows + 1 :] = num_tokens
        to["seq_lens"][:num_rows] = seq_lens
        to["rows"][:num_rows] = plan.rows
        to["rows"][num_rows:] = self.num_rows
        # Of several tables, only the part in use: drafters, who look further, go with one.
        width = shape.num_pages if len(self.group_tables) == 1 else num_pages
        columns, offsets = positions // self.block_size, positions % self.block_size
        for group, table in enumerate(self.group_tables):
            slots, tables = table_names(group)
            to[slots][:num_tokens] = table[token_rows, columns] * self.block_size + offsets
            to[tables][:num_rows, :width] = table[:, :width][plan.rows]
            if self.num_blocks is not None:
                check_batch(
                    to[tables],
                    to["seq_lens"],
                    to["query_start_loc"],
                    num_pages=self.num_blocks,
                    page_size=self.block_size,
                    num_tokens=shape.num_tokens,
                )
        if shape.num_prefixes:
            self._fill_prefixes(plan, to)
        self._fill_token_ids(plan, ends, seq_lens, to["token_ids"])
        return shape, packed

    def _fill_prefixes(self, plan: StepPlan, to: dict[str, np.ndarray]) -> None:
        """What the plan's groups share, read off the first row of each; unused groups own no tokens."""
        groups = plan.prefix_groups
        assert groups is not None
        ends = np.cumsum(groups.num_rows)
        to["prefix_start_loc"][1 : len(ends) + 1] = ends
        to["prefix_start_loc"][len(ends) + 1 :] = ends[-1]
        to["prefix_lens"][: len(ends)] = groups.num_blocks * self.block_size
        first_rows = plan.rows[ends - groups.num_rows]
        for group, (row, count) in enumerate(zip(first_rows, groups.num_blocks, strict=True)):
            to["prefix_tables"][group, :count] = self.block_tables[row, :count]

    def _fill_token_ids(
        self, plan: StepPlan, ends: np.ndarray, seq_lens: np.ndarray, out: np.ndarray
    ) -> None:
        """Known tokens from the host, `FROM_DEVICE` for a row that has run past what the host knows; with drafts, these
        after the token that the plan brings."""
        from_host = self.num_known[plan.rows] >= seq_lens
        if plan.drafts is None:
            out[(ends - 1)[~from_host]] = FROM_DEVICE
        else:
            counts = plan.drafts.num_drafts
            first = ends - 1 - counts
            out[first[~from_host]] = plan.drafts.last_token_ids[~from_host]
            place = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
            out[np.repeat(first + 1, counts) + place] = plan.drafts.token_ids
        for r in np.flatnonzero(from_host):
            admitted = self.admitted[plan.rows[r]]
            assert admitted is not None, f"row {plan.rows[r]} was scheduled before it was admitted"
            start, stop = plan.num_computed[r], seq_lens[r]
            known, forced = admitted.token_ids, self.forced.get(int(plan.rows[r]))
            if forced is not None and start >= forced.start:
                known, start, stop = forced.token_ids, start - forced.start, stop - forced.start
            out[ends[r] - (stop - start) : ends[r]] = known[start:stop]
