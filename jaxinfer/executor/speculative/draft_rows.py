"""What of a step's rows a drafter works on: where each goes on from, and how far its blocks reach."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.engine.plan import Int32, StepPlan
from jaxinfer.executor.buckets import StepShape
from jaxinfer.executor.sampling_rows import ACTIVE
from jaxinfer.models.batch import RaggedBatch

# Columns of the packed lines; the row's block table follows them.
ROW, TOKEN, POSITION, END, NEXT, NUM_COLUMNS = range(6)

NO_NEXT = -1


class DraftRowPacker:
    """The host's mirror of how many blocks each row holds, from which a step's lines are packed.

    A row's blocks may reach less far than its drafts would: positions from `END` on have no slot.
    """

    def __init__(self, num_rows: int, block_size: int, max_positions: int) -> None:
        """`max_positions`: of the model that drafts."""
        self._padding = num_rows
        self._block_size = block_size
        self._max_positions = max_positions
        self._num_blocks = np.zeros(num_rows + 1, np.int32)
        self._known: dict[int, Int32] = {}

    def apply(self, plan: StepPlan) -> None:
        """Take over the plan's admissions and new block-table entries."""
        for admitted in plan.admitted:
            self._num_blocks[admitted.row] = 0
            self._known[admitted.row] = admitted.token_ids
        np.maximum.at(self._num_blocks, plan.block_rows, plan.block_cols + 1)

    def pack(
        self, plan: StepPlan, shape: StepShape, sampling: np.ndarray, block_tables: np.ndarray
    ) -> np.ndarray:
        """Lines [R, NUM_COLUMNS + P] int32 for the rows of `shape`.

        ROW       the row, S for padding
        TOKEN     index in the batch of its last token before its drafts
        POSITION  of the token after that one
        END       its first position without a slot; 0 where the row doesn't sample
        NEXT      what follows its last token, where the row doesn't sample; else `NO_NEXT`

        Args:
            sampling: [R, …] as in `DraftStep`.
            block_tables: [R, P].
        """
        assert plan.drafts is not None
        n = len(plan.rows)
        lines = np.zeros((shape.num_rows, NUM_COLUMNS + shape.num_pages), np.int32)
        lines[n:, ROW] = self._padding
        lines[n:, TOKEN] = shape.num_tokens
        lines[:, NEXT] = NO_NEXT
        lines[:n, ROW] = plan.rows
        ends = plan.num_computed + plan.num_scheduled
        lines[:n, TOKEN] = np.cumsum(plan.num_scheduled) - 1 - plan.drafts.num_drafts
        lines[:n, POSITION] = ends - plan.drafts.num_drafts
        samples = sampling[:n, ACTIVE] != 0
        columns = np.minimum(self._num_blocks[plan.rows], shape.num_pages)
        reach = np.minimum(columns * self._block_size, self._max_positions)
        lines[:n, END] = np.where(samples, reach, 0)
        for r in np.flatnonzero(~samples).tolist():
            known = self._known[int(plan.rows[r])]
            if ends[r] < len(known):
                lines[r, NEXT] = known[ends[r]]
        lines[:n, NUM_COLUMNS:] = block_tables[:n]
        return lines


@dataclass(frozen=True)
class DraftRows:
    """The packed lines on the device, once the step's tokens are there."""

    lines: jax.Array
    last_tokens: jax.Array
    num_accepted: jax.Array
    """Both by row, as in `DraftStep`."""

    @property
    def active(self) -> jax.Array:
        """[R] whether to draft for the row."""
        return self.lines[:, END] > 0

    @property
    def accepted(self) -> jax.Array:
        """[R], 0 for rows that don't sample."""
        return jnp.where(self.active, self.num_accepted[self.lines[:, ROW]], 0)

    @property
    def hidden_index(self) -> jax.Array:
        """[R] index in the batch of each row's last token that stays; T for padding."""
        return self.lines[:, TOKEN] + self.accepted

    @property
    def next_tokens(self) -> jax.Array:
        """[R] the token that follows it."""
        return jnp.where(self.active, self.last_tokens[self.lines[:, ROW]], self.lines[:, NEXT])

    @property
    def next_positions(self) -> jax.Array:
        return self.lines[:, POSITION] + self.accepted


def one_token_batch(
    lines: jax.Array, token_ids: jax.Array, positions: jax.Array, block_size: int
) -> tuple[RaggedBatch, jax.Array]:
    """A batch of one token a row [R], and which rows have a slot for it. The others are like padding."""
    R = len(lines)
    has_slot = positions < lines[:, END]
    tables = jnp.where(has_slot[:, None], lines[:, NUM_COLUMNS:], 0)
    positions = jnp.where(has_slot, positions, 0)
    blocks = jnp.take_along_axis(tables, positions[:, None] // block_size, axis=1)[:, 0]
    batch = RaggedBatch(
        token_ids=token_ids,
        positions=positions,
        slot_mapping=jnp.where(has_slot, blocks * block_size + positions % block_size, 0),
        query_start_loc=jnp.arange(R + 1, dtype=jnp.int32),
        seq_lens=jnp.where(has_slot, positions + 1, 0),
        block_tables=tables,
        decode_only=True,
    )
    return batch, has_slot
