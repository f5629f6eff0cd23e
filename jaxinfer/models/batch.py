"""The device's view of one step: a flat list of tokens from any mix of requests."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import NamedTuple

import jax

from kernels_pallas import SharedPrefixes


class PageTables(NamedTuple):
    """Where a group of layers keeps the batch's tokens: see `RaggedBatch.slot_mapping` and `block_tables`."""

    slot_mapping: jax.Array
    block_tables: jax.Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class RaggedBatch:
    """T tokens of R rows (requests), each row's tokens next to each other; rows with one token come first.

    T, R and P are bucketed. Padding tokens stand at the end, belong to no row (`query_start_loc[-1]` is the number
    of real tokens) and have token, position and slot 0: page 0 is never handed out, so what they write is never
    read. Padding rows have `seq_lens` 0 and repeat the last start. `decode_only` promises T == R with row r being
    token r.
    """

    token_ids: jax.Array
    """[T] int32"""
    positions: jax.Array
    """[T] int32, place in the request's own sequence."""
    slot_mapping: jax.Array
    """[T] int32, page * page_size + offset of where the token's key and value are kept."""
    query_start_loc: jax.Array
    """[R+1] int32, the first token of each row."""
    seq_lens: jax.Array
    """[R] int32, context length after this step, its own tokens included."""
    block_tables: jax.Array
    """[R, P] int32, pages of each row in order; entries past the context are 0, entries before a window anything."""
    decode_only: bool = field(metadata={"static": True})
    batch_invariant: bool = field(default=False, metadata={"static": True})
    """A token's result may depend on its own context alone, to the bit, among batches of one shape."""
    shared_prefixes: SharedPrefixes | None = None
    """First pages that rows have in common, where it pays to attend to them once."""
    more_tables: tuple[PageTables, ...] = ()
    """Those of further groups of layers (see `cache_groups`), where there are any."""
    state_slots: jax.Array | None = None
    """[R] int32, where each row's request keeps the states of layers that have some; the last slot for padding rows.
    None: the model has no such layers."""

    adapter_slots: jax.Array | None = None
    """[T] int32, 0 for a token without an adapter: see `lora.LayerAdapters`. None: the model runs without any."""

    def of_group(self, group: int) -> RaggedBatch:
        """The batch as the layers of a group see it."""
        if group == 0:
            return replace(self, more_tables=()) if self.more_tables else self
        tables = self.more_tables[group - 1]._asdict()
        return replace(self, more_tables=(), shared_prefixes=None, **tables)
