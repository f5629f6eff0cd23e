"""What a step's result means: tokens appended, requests that end, and the message for the frontend."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from jaxinfer.engine.logprobs import new_prompt_logprobs, token_logprobs
from jaxinfer.engine.messages import EngineCoreOutputs, FinishedRequest, FinishReason, Pooled
from jaxinfer.engine.plan import Int32, StepResult
from jaxinfer.engine.request import Request, RequestState
from jaxinfer.engine.row_table import RowTable
from jaxinfer.engine.scheduled_step import Batch, Index, ScheduledStep
from jaxinfer.engine.stats import SpecDecodeStats
from jaxinfer.engine.stop_rules import end_of, rows_to_check

NAN_LOGITS = (
    "NaN logits: the model's output for this request is not a number, so no token can be sampled. "
    "The weights, the dtype or a custom logits processor are at fault."
)

NAN_VECTORS = "NaN: the model's output for this request is not a number. The weights or the dtype are at fault."


class StepUpdate:
    """Applies a result to the row table. `ended` are the requests to finish, `outputs` what to report.

    Three kinds of sampled rows: those whose request still runs there; those whose request was preempted while the
    step was in flight (the token is its all the same); and those whose request has ended (dropped).

    A row may get a run of tokens: its drafts that were right and the token after them, or a sampled token and those that
    a grammar forces after it. What would follow the request's end is dropped.
    """

    def __init__(self, table: RowTable, step: ScheduledStep, result: StepResult) -> None:
        self.ended: list[Request] = []
        self.outputs = EngineCoreOutputs(
            timestamp=time.monotonic(), first_scheduled=step.first_scheduled
        )
        self.spec_decode: SpecDecodeStats | None = None
        self._table = table
        self._step = step
        self._result = result
        self._starts: Int32 | None = None
        """Where each row's tokens begin in the result."""
        if result.num_tokens is not None:
            self._starts = np.cumsum(result.num_tokens) - result.num_tokens
        if result.prompt_logprobs:
            self._report_prompt_logprobs()
        live = step.batch.live(table)
        if step.all_sample and live.all() and not result.invalid.any():
            self._append_live(None)
        else:
            sampled = step.plan.samples
            valid = sampled & ~result.invalid
            self._append_live(np.flatnonzero(valid & live))
            for position in np.flatnonzero(valid & ~live).tolist():
                self._append_preempted(position)
            for position in np.flatnonzero(sampled & result.invalid).tolist():
                self._fail(position)
        if result.logprobs is not None:
            self._report_logprobs()
        if result.num_tokens is not None:
            self._report_drafts(result.num_tokens)
        if result.pooled:
            self._report_pooled()

    def _append_live(self, positions: Index | None) -> None:
        """Append the tokens at these positions of the plan (None: all) to their rows."""
        batch, table = self._step.batch, self._table
        self._positions = None if positions is None else positions.tolist()
        if positions is not None:
            batch = batch.take(positions)
        self.outputs.request_ids = batch.request_ids
        if self._step.forced or self._starts is not None:
            self._append_runs(batch, range(len(batch.rows)) if positions is None else positions)
            return
        tokens = self._result.token_ids
        if positions is not None:
            tokens = tokens[positions]
        num_output = table.append_tokens(batch.rows, tokens)
        self.outputs.token_ids = tokens.tolist()
        due = rows_to_check(table, batch.rows, tokens, num_output)
        if table.num_guided:
            due |= table.guided[batch.rows]
        for i in np.flatnonzero(due).tolist():
            self._ends(batch.requests[i], int(tokens[i]), int(num_output[i]))

    def _append_runs(self, batch: Batch, positions: Sequence[int] | Index) -> None:
        """Append a run of tokens to each row of the live `batch`, which is at `positions` of the plan."""
        table, rows = self._table, batch.rows
        runs = [self._run(position) for position in positions]
        counts = np.array([len(run) for run in runs], np.int32)
        if self._result.num_tokens is not None:
            # The table counted one token of each row when the step was planned.
            accepted = self._result.num_tokens[list(positions)] - 1
            table.num_tokens[rows] += accepted
            table.num_computed[rows] += accepted
        if runs:
            before = table.num_output[rows]
            index = np.repeat(np.arange(len(runs)), counts)
            ordinal = np.arange(len(index)) - (np.cumsum(counts) - counts)[index] + 1
            tokens, all_rows = np.concatenate(runs), rows[index]
            due = rows_to_check(table, all_rows, tokens, before[index] + ordinal)
            due |= table.guided[all_rows]
            ended: set[int] = set()
            for t in np.flatnonzero(due).tolist():
                i = int(index[t])
                num_output = int(before[i] + ordinal[t])
                if i not in ended and self._ends(batch.requests[i], int(tokens[t]), num_output):
                    ended.add(i)
                    counts[i] = ordinal[t]
            tokens = tokens[ordinal <= counts[index]]
            table.append_runs(rows, tokens, counts)
            self.outputs.token_ids = tokens.tolist()
        self.outputs.num_tokens = counts.tolist()

    def _append_preempted(self, position: int) -> None:
        request = self._step.batch.requests[position]
        if request.state is not RequestState.PREEMPTED:
            return
        tokens = self._run(position).tolist()
        assert self._positions is not None
        self._positions.append(position)
        self.outputs.request_ids.append(request.request_id)
        request.num_in_flight -= 1 + len(self._step.forced.get(position, ()))
        num_output = len(request.output_token_ids)
        for i, token in enumerate(tokens):
            if self._ends(request, token, num_output + i + 1):
                tokens = tokens[: i + 1]
                break
        request.output_token_ids = np.append(request.output_token_ids, np.array(tokens, np.int32))
        self.outputs.token_ids += tokens
        if self.outputs.num_tokens is not None:
            self.outputs.num_tokens.append(len(tokens))

    def _run(self, position: int) -> Int32:
        """What the step brought at this position of the plan."""
        result = self._result
        if self._starts is not None and result.num_tokens is not None:
            start = int(self._starts[position])
            run = result.token_ids[start : start + int(result.num_tokens[position])]
        else:
            run = result.token_ids[position : position + 1]
        forced = self._step.forced.get(position)
        return run if forced is None else np.concatenate([run, forced])

    def _ends(self, request: Request, token: int, num_output: int) -> bool:
        """Whether `token`, the last of `num_output`, ends the request, which is reported; its grammar hears of it too."""
        error = None if request.matcher is None else request.matcher.accept(token)
        if error is not None:
            end: FinishedRequest | None = FinishedRequest(
                request.request_id, FinishReason.ERROR, f"structured_outputs: {error}"
            )
        else:
            end = end_of(request, token, num_output)
        if end is not None:
            self._end(request, end)
        return end is not None

    def _end(self, request: Request, end: FinishedRequest) -> None:
        end.num_preemptions = request.num_preemptions
        self.ended.append(request)
        self.outputs.finished.append(end)

    def _fail(self, position: int) -> None:
        request = self._step.batch.requests[position]
        if request.state is not RequestState.FINISHED:
            text = NAN_LOGITS if request.pooling is None else NAN_VECTORS
            error = FinishedRequest(request.request_id, FinishReason.ERROR, text)
            self._end(request, error)

    def _report_logprobs(self) -> None:
        arrays = self._result.logprobs
        assert arrays is not None
        requests = self._step.batch.requests
        positions = range(len(requests)) if self._positions is None else self._positions
        first = 0
        for i, position in enumerate(positions):
            count = 1 if self.outputs.num_tokens is None else self.outputs.num_tokens[i]
            num_top = requests[position].sampling_params.logprobs
            if num_top is not None:
                start = position if self._starts is None else int(self._starts[position])
                for t in range(count):
                    self.outputs.logprobs[first + t] = token_logprobs(arrays, start + t, num_top)
            first += count

    def _report_drafts(self, num_tokens: Int32) -> None:
        drafts = self._step.plan.drafts
        assert drafts is not None
        drafted = np.flatnonzero(drafts.num_drafts)
        counts, accepted = drafts.num_drafts[drafted], num_tokens[drafted] - 1
        for position, *numbers in zip(
            drafted.tolist(), counts.tolist(), accepted.tolist(), strict=True
        ):
            request_id = self._step.batch.request_ids[position]
            self.outputs.num_drafted[request_id] = (numbers[0], numbers[1])
        self.spec_decode = SpecDecodeStats(
            num_drafts=len(drafted),
            num_draft_tokens=int(counts.sum()),
            num_accepted_tokens=int(accepted.sum()),
            num_accepted_tokens_per_pos=[
                int(np.count_nonzero(accepted > i)) for i in range(int(accepted.max(initial=0)))
            ],
        )

    def _report_pooled(self) -> None:
        """In place of tokens."""
        for position, array in self._result.pooled.items():
            request = self._step.batch.requests[position]
            if request.state is not RequestState.FINISHED and not self._result.invalid[position]:
                pooled = Pooled(list(array.shape), array.astype(np.float32).tobytes())
                self.outputs.pooled[request.request_id] = pooled
        self.outputs.request_ids, self.outputs.token_ids = [], []

    def _report_prompt_logprobs(self) -> None:
        for position, arrays in self._result.prompt_logprobs.items():
            request = self._step.batch.requests[position]
            if request.state is RequestState.FINISHED:
                continue
            num_computed = int(self._step.plan.num_computed[position])
            entries = new_prompt_logprobs(request, arrays, num_computed)
            if entries:
                self.outputs.prompt_logprobs[request.request_id] = entries
