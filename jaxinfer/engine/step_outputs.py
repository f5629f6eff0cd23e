"""What a step's result means: tokens appended, requests that end, and the message for the frontend."""

from __future__ import annotations

import time

import numpy as np

from jaxinfer.engine.logprobs import new_prompt_logprobs, token_logprobs
from jaxinfer.engine.messages import EngineCoreOutputs, FinishedRequest, FinishReason
from jaxinfer.engine.plan import Int32, StepResult
from jaxinfer.engine.request import Request, RequestState
from jaxinfer.engine.row_table import RowTable
from jaxinfer.engine.scheduled_step import Batch, Index, ScheduledStep
from jaxinfer.engine.stop_rules import end_of, rows_to_check

NAN_LOGITS = (
    "NaN logits: the model's output for this request is not a number, so no token can be sampled. "
    "The weights, the dtype or a custom logits processor are at fault."
)

NO_TOKENS: Int32 = np.empty(0, np.int32)


class StepUpdate:
    """Applies a result to the row table. `ended` are the requests to finish, `outputs` what to report.

    Three kinds of sampled rows: those whose request still runs there; those whose request was preempted while the
    step was in flight (the token is its all the same); and those whose request has ended (dropped).
    """

    def __init__(self, table: RowTable, step: ScheduledStep, result: StepResult) -> None:
        self.ended: list[Request] = []
        self.outputs = EngineCoreOutputs(
            timestamp=time.monotonic(), first_scheduled=step.first_scheduled
        )
        self._table = table
        self._step = step
        self._result = result
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

    def _append_live(self, positions: Index | None) -> None:
        """Append the tokens at these positions of the plan (None: all) to their rows."""
        batch, tokens = self._step.batch, self._result.token_ids
        if positions is not None:
            batch, tokens = batch.take(positions), tokens[positions]
        num_output = self._table.append_tokens(batch.rows, tokens)
        self._positions = None if positions is None else positions.tolist()
        self.outputs.request_ids = batch.request_ids
        self.outputs.token_ids = tokens.tolist()
        if self._step.forced:
            num_output = self._append_forced(batch, num_output)
        due = rows_to_check(self._table, batch.rows, tokens, num_output)
        if self._table.num_guided:
            due |= self._table.guided[batch.rows]
        for i in np.flatnonzero(due).tolist():
            position = i if self._positions is None else self._positions[i]
            self._end(batch.requests[i], position, int(num_output[i]))

    def _append_forced(self, batch: Batch, num_output: Int32) -> Int32:
        """Let forced tokens follow the sampled ones of this `batch`; returns the output lengths."""
        num_output = num_output.copy()
        counts, token_ids = [], []
        for i, token in enumerate(self.outputs.token_ids):
            position = i if self._positions is None else self._positions[i]
            token_ids.append(token)
            forced = self._step.forced.get(position, NO_TOKENS)
            for one in forced:
                num_output[i] = self._table.append_tokens(batch.rows[i : i + 1], one[None])[0]
            token_ids += forced.tolist()
            counts.append(1 + len(forced))
        self.outputs.token_ids, self.outputs.num_tokens = token_ids, counts
        return num_output

    def _append_preempted(self, position: int) -> None:
        request = self._step.batch.requests[position]
        if request.state is not RequestState.PREEMPTED:
            return
        tokens = self._tokens(position)
        request.output_token_ids = np.append(request.output_token_ids, np.array(tokens, np.int32))
        request.num_in_flight -= len(tokens)
        assert self._positions is not None
        self._positions.append(position)
        self.outputs.request_ids.append(request.request_id)
        self.outputs.token_ids += tokens
        if self.outputs.num_tokens is not None:
            self.outputs.num_tokens.append(len(tokens))
        self._end(request, position, len(request.output_token_ids))

    def _tokens(self, position: int) -> list[int]:
        """What the step brought at this position of the plan: the sampled token and those forced after it."""
        forced = self._step.forced.get(position, NO_TOKENS)
        return [int(self._result.token_ids[position]), *forced.tolist()]

    def _end(self, request: Request, position: int, num_output: int) -> None:
        """End the request if its new tokens do; its grammar hears of them too."""
        *before, token = self._tokens(position)
        error = None
        if request.matcher is not None:
            errors = (request.matcher.accept(one) for one in (*before, token))
            error = next((text for text in errors if text is not None), None)
        if error is not None:
            end: FinishedRequest | None = FinishedRequest(
                request.request_id, FinishReason.ERROR, f"structured_outputs: {error}"
            )
        else:
            end = end_of(request, token, num_output)
        if end is not None:
            self.ended.append(request)
            self.outputs.finished.append(end)

    def _fail(self, position: int) -> None:
        request = self._step.batch.requests[position]
        if request.state is not RequestState.FINISHED:
            self.ended.append(request)
            self.outputs.finished.append(
                FinishedRequest(request.request_id, FinishReason.ERROR, NAN_LOGITS)
            )

    def _report_logprobs(self) -> None:
        arrays = self._result.logprobs
        assert arrays is not None
        requests = self._step.batch.requests
        positions = range(len(requests)) if self._positions is None else self._positions
        first = 0
        for i, position in enumerate(positions):
            num_top = requests[position].sampling_params.logprobs
            if num_top is not None:
                self.outputs.logprobs[first] = token_logprobs(arrays, position, num_top)
            first += 1 if self.outputs.num_tokens is None else self.outputs.num_tokens[i]

    def _report_prompt_logprobs(self) -> None:
        for position, arrays in self._result.prompt_logprobs.items():
            request = self._step.batch.requests[position]
            if request.state is RequestState.FINISHED:
                continue
            num_computed = int(self._step.plan.num_computed[position])
            entries = new_prompt_logprobs(request, arrays, num_computed)
            if entries:
                self.outputs.prompt_logprobs[request.request_id] = entries
