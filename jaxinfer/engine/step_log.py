"""What the latest steps held. Written only while somebody looks on."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from jaxinfer.engine.messages import EngineCoreOutputs
from jaxinfer.engine.plan import Bool, Int32
from jaxinfer.engine.row_table import RowTable
from jaxinfer.engine.scheduled_step import ScheduledStep

_CAPACITY = 1024
_WATCH_SECONDS = 10.0
"""How long steps are written down after somebody has asked for them."""
RATE_SECONDS = 2.0

_COLUMNS = ("time", "prefill", "decode", "draft", "accepted", "generated")


class StepParts(NamedTuple):
    """Of a step's R rows: how many known tokens each computes, guesses not counted, how many guesses it verifies, and
    whether the row is in its prefill: it computes tokens of its prompt, or several at once, as after a preemption."""

    num_known: Int32
    num_drafts: Int32
    is_prefill: Bool

    @classmethod
    def of(cls, step: ScheduledStep, table: RowTable) -> StepParts:
        plan, batch = step.plan, step.batch
        num_prompt = table.num_prompt[batch.rows]
        for i in np.flatnonzero(~batch.live(table)).tolist():
            num_prompt[i] = len(batch.requests[i].prompt_token_ids)
        drafts = np.zeros(len(plan.rows), np.int32)
        if plan.drafts is not None:
            drafts = plan.drafts.num_drafts
        known = plan.num_scheduled - drafts
        return cls(known, drafts, (known > 1) | (plan.num_computed < num_prompt))

    @property
    def totals(self) -> tuple[int, int, int]:
        """Tokens of prefills, of decodes, and guesses."""
        num_prefill = int(self.num_known[self.is_prefill].sum())
        return num_prefill, int(self.num_known.sum()) - num_prefill, int(self.num_drafts.sum())


class StepLog:
    """The last steps, at most `_CAPACITY` of them, and of the very last one all there is to know (`last`, None before
    the first). Times are `time.monotonic` seconds."""

    def __init__(self) -> None:
        self.last: ScheduledStep | None = None
        self._rows = np.zeros((_CAPACITY, len(_COLUMNS)))
        self._num_added = 0
        self._watched_since = 0.0
        self._watched_until = -np.inf

    def watch(self, now: float) -> None:
        """Steps are written down from now on, for a while."""
        if now >= self._watched_until:
            self._num_added = 0
            self._watched_since = now
        self._watched_until = now + _WATCH_SECONDS

    def add(self, step: ScheduledStep, outputs: EngineCoreOutputs, table: RowTable) -> None:
        """A step whose results are here, and in `table`."""
        self.last = step
        if outputs.timestamp >= self._watched_until:
            return
        stats = outputs.stats
        drafted = None if stats is None else stats.spec_decode
        num_accepted = 0 if drafted is None else drafted.num_accepted_tokens
        totals = StepParts.of(step, table).totals
        self._rows[self._num_added % _CAPACITY] = (
            outputs.timestamp,
            *totals,
            num_accepted,
            len(outputs.token_ids),
        )
        self._num_added += 1

    def latest(self, limit: int) -> dict[str, npt.NDArray[np.float64]]:
        """The last steps, oldest first, by column."""
        count = min(self._num_added, limit, _CAPACITY)
        index = np.arange(self._num_added - count, self._num_added) % _CAPACITY
        return dict(zip(_COLUMNS, self._rows[index].T, strict=True))

    def rates(self, now: float) -> tuple[float, float, float] | None:
        """How many seconds were looked at, and the prefill's and the generated tokens of each of them. None where the
        watch has just begun."""
        steps = self.latest(_CAPACITY)
        start = max(now - RATE_SECONDS, self._watched_since)
        if self._num_added > _CAPACITY:
            start = max(start, float(steps["time"][0]))
        if (seconds := now - start) <= 0:
            return None
        due = steps["time"] > start
        prefill, generated = steps["prefill"][due].sum(), steps["generated"][due].sum()
        return seconds, float(prefill) / seconds, float(generated) / seconds
