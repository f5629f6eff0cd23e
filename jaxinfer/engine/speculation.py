"""Which tokens the next step verifies: guesses for what follows a row's last token, computed along with it."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt

from jaxinfer.config import EngineConfig
from jaxinfer.engine.kv_cache_manager import KVCacheManager, TableEntries
from jaxinfer.engine.ngram import ngram_drafts
from jaxinfer.engine.plan import Bool, Drafts, Int32, StepResult
from jaxinfer.engine.request import Request
from jaxinfer.engine.row_table import RowTable
from jaxinfer.engine.scheduled_step import Batch, ScheduledStep
from jaxinfer.speculative_config import SpeculativeConfig


class DraftSource(Protocol):
    def drafts(self, row: int, limit: int) -> Int32:
        """At most `limit` guesses for what follows the last token of a row."""
        ...

    def store(self, step: ScheduledStep, result: StepResult) -> None:
        """A step's result has been appended to the rows."""
        ...

    def clear(self) -> None:
        """A step has been planned: guesses that it didn't take are lost."""
        ...


class NgramSource:
    def __init__(self, config: SpeculativeConfig, table: RowTable) -> None:
        self._range = config.prompt_lookup_max, config.prompt_lookup_min
        self._table = table

    def drafts(self, row: int, limit: int) -> Int32:
        tokens = self._table.token_ids(row, 0, int(self._table.num_tokens[row]))
        return ngram_drafts(tokens, *self._range, limit)

    def store(self, step: ScheduledStep, result: StepResult) -> None:
        pass

    def clear(self) -> None:
        pass


class ExecutorSource:
    """Guesses that came with the result of the step before."""

    def __init__(self, table: RowTable) -> None:
        self._table = table
        self._drafts: dict[int, Int32] = {}

    def drafts(self, row: int, limit: int) -> Int32:
        drafts = self._drafts.get(row)
        return np.empty(0, np.int32) if drafts is None else drafts[:limit]

    def store(self, step: ScheduledStep, result: StepResult) -> None:
        if result.draft_token_ids is None:
            return
        live = step.plan.samples & step.batch.live(self._table)
        for position in np.flatnonzero(live).tolist():
            drafts = result.draft_token_ids[position]
            none = np.flatnonzero(drafts < 0)
            row = int(step.batch.rows[position])
            self._drafts[row] = drafts[: none[0]] if none.size else drafts

    def clear(self) -> None:
        self._drafts = {}


class Speculation:
    """`num_drafts[s]` of row s are part of the step that is being planned.

    What a guess is decides only where a row's guesses end, never whether it is verified: guesses that are drawn at
    random would be biased otherwise. So one that the grammar excludes or that ends the request is kept, as the last.
    """

    def __init__(self, config: SpeculativeConfig, engine: EngineConfig, table: RowTable) -> None:
        self._config = config
        self._budget = engine.scheduler.max_num_batched_tokens
        self._table = table
        num_rows = len(table.num_tokens)
        self.num_drafts = np.zeros(num_rows, np.int32)
        self._drafts = np.zeros((num_rows, config.num_speculative_tokens), np.int32)
        self.source: DraftSource = (
            ExecutorSource(table) if config.from_model else NgramSource(config, table)
        )

    def choose(self, batch: Batch, computed: Int32, counts: Int32, kv: KVCacheManager) -> Int32:
        """Decide on the guesses of the running `batch` [R], of which the step computes `counts` [R] known tokens after
        the first `computed` [R]. Returns how many each row has, no more than budget and free blocks allow."""
        table, rows = self._table, batch.rows
        self.num_drafts[:] = 0
        decoding = (
            (counts == 1) & (computed + 1 == table.num_tokens[rows]) & (table.num_output[rows] > 0)
        )
        if 0 < np.count_nonzero(decoding) <= self._config.disable_by_batch_size:
            room = np.minimum(
                table.max_total[rows] - table.num_tokens[rows] - 1,
                self._config.num_speculative_tokens,
            )
            budget = self._budget - int(counts.sum())
            for i in np.flatnonzero(decoding & (room > 0)).tolist():
                if budget <= 0:
                    break
                row = int(rows[i])
                drafts = self.source.drafts(row, min(int(room[i]), budget))
                drafts = drafts[: self._useful(batch.requests[i], drafts)]
                self.num_drafts[row] = len(drafts)
                self._drafts[row, : len(drafts)] = drafts
                budget -= len(drafts)
            self._fit_blocks(rows, computed + counts, kv)
        self.source.clear()
        return self.num_drafts[rows]

    def look_ahead(
        self, batch: Batch, counts: Int32, kv: KVCacheManager, entries: list[TableEntries]
    ) -> None:
        """Give rows of the planned `batch` [R] that will sample the blocks that the drafter writes ahead, if all of
        them can have theirs; `counts` [R] are their known tokens, `entries` grow."""
        if not self._config.num_lookahead_tokens:
            return
        table = self._table
        ends = table.num_computed[batch.rows] + counts
        rows = batch.rows[ends == table.num_tokens[batch.rows]]
        ahead = table.num_tokens[rows] + self.num_drafts[rows] + self._config.num_lookahead_tokens
        missing = np.maximum(kv.missing(rows, np.minimum(ahead, table.max_total[rows])), 0)
        if missing.sum() * kv.num_groups <= kv.pool.num_free:
            entries.append(kv.grow(rows, missing))

    def plan(self, batch: Batch, computed: Int32, samples: Bool) -> Drafts:
        """What a plan of this `batch` [R] says, whose rows have `computed` [R] tokens before the step."""
        table, rows = self._table, batch.rows
        num_drafts = self.num_drafts[rows]
        return Drafts(
            last_token_ids=np.where(
                computed == table.num_prompt[rows] + table.num_output[rows] - 1,
                table.last_output_tokens(rows),
                0,
            ).astype(np.int32),
            num_drafts=num_drafts,
            token_ids=self._drafts[rows][_first(num_drafts, self._drafts.shape[1])],
            wanted=self._config.from_model
            and 0 < int(np.count_nonzero(samples)) <= self._config.disable_by_batch_size,
        )

    def of_row(self, row: int) -> Int32:
        """The guesses of a row in the step that was planned last."""
        return self._drafts[row, : self.num_drafts[row]]

    def update(self, step: ScheduledStep, result: StepResult) -> None:
        """Take in the guesses that came with a result, once its tokens have been appended."""
        self.source.store(step, result)

    def _useful(self, request: Request, drafts: Int32) -> int:
        """How many of the guesses are worth verifying: nothing follows one that can't come or that ends the request."""
        if not drafts.size:
            return 0
        rows = np.full(len(drafts), request.row, np.int32)
        stops = np.flatnonzero(self._table.is_stop_token(rows, drafts))
        count = int(stops[0]) + 1 if stops.size else len(drafts)
        if request.matcher is not None:
            count = min(count, request.matcher.num_valid(drafts[:count].tolist()) + 1)
        return count

    def _fit_blocks(self, rows: Int32, ends: Int32, kv: KVCacheManager) -> None:
        """Drop guesses, those of the last rows first, until the free blocks hold what is computed: `ends` [R] tokens of
        each row and the guesses. Nobody is preempted for a guess."""
        missing = np.maximum(kv.missing(rows, ends + self.num_drafts[rows]), 0)
        short = int(missing.sum()) * kv.num_groups - kv.pool.num_free
        if short <= 0:
            return
        held = np.maximum(kv.num_blocks[rows], kv.blocks_for(ends)) * kv.block_size - ends
        for i in reversed(range(len(rows))):
            row = int(rows[i])
            kept = min(int(self.num_drafts[row]), int(held[i]))
            self.num_drafts[row] = kept
            spared = missing[i] - max(kv.missing(rows[i], ends[i] + kept), 0)
            short -= int(spared) * kv.num_groups
            if short <= 0:
                return


def _first(counts: Int32, width: int) -> npt.NDArray[np.bool_]:
    """[R, width], true in the first `counts[r]` columns of row r."""
    mask: npt.NDArray[np.bool_] = np.arange(width) < counts[:, None]
    return mask
