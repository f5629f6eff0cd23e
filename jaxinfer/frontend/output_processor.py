"""From the core's columns of tokens to the outputs of requests."""

from __future__ import annotations

import time
from collections.abc import Iterable

import numpy as np

from jaxinfer.engine.messages import (
    EngineCoreOutputs,
    FinishedRequest,
    FinishReason,
    TokenLogprobs,
)
from jaxinfer.frontend.processor import PreparedRequest
from jaxinfer.frontend.request_state import CompletionState, RequestState, Sink
from jaxinfer.frontend.token_text import TokenText
from jaxinfer.sampling_params import RequestOutputKind


class OutputProcessor:
    """Holds every unfinished request; `process` takes what a step brought and calls their sinks.

    For use by one thread at a time.
    """

    def __init__(self, token_text: TokenText) -> None:
        self._token_text = token_text
        self._completions: dict[str, CompletionState] = {}
        self._requests: dict[str, list[RequestState]] = {}
        self._last: dict[int, tuple[list[str], list[CompletionState | None]]] = {}

    @property
    def num_unfinished(self) -> int:
        """Completions that the core still works on."""
        return len(self._completions)

    def add(
        self, prepared: PreparedRequest, sink: Sink, kind: RequestOutputKind | None = None
    ) -> RequestState:
        """Expect outputs of a request; `kind` overrules that of its sampling parameters."""
        if kind is None:
            kind = prepared.sampling_params.output_kind
        request = RequestState(prepared, self._token_text, kind, sink, time.monotonic())
        for completion in request.completions:
            self._completions[completion.core_id] = completion
        self._requests.setdefault(request.request_id, []).append(request)
        return request

    def process(self, outputs: EngineCoreOutputs) -> list[str]:
        """Returns the core's ids of completions that a stop string ended, for the core to abort."""
        now = outputs.timestamp or time.monotonic()
        finished = {end.request_id: end for end in outputs.finished}
        touched: dict[RequestState, None] = {}
        for admission in outputs.first_scheduled:
            if completion := self._completions.get(admission.request_id):
                request = completion.request
                if request.metrics.first_scheduled_time is None:
                    request.metrics.first_scheduled_time = admission.scheduled
                    request.num_cached_tokens = admission.num_cached_tokens
        for core_id, positions in outputs.prompt_logprobs.items():
            if completion := self._completions.get(core_id):
                completion.request.add_prompt_logprobs(positions)
        for core_id, (drafted, accepted) in outputs.num_drafted.items():
            if completion := self._completions.get(core_id):
                completion.request.metrics.num_draft_tokens += drafted
                completion.request.metrics.num_accepted_tokens += accepted
        for core_id, pooled in outputs.pooled.items():
            if completion := self._completions.get(core_id):
                array = np.frombuffer(pooled.data, np.float32).reshape(pooled.shape)
                completion.request.pooled = array
        to_abort = self._add_tokens(outputs, finished, touched, now)
        for end in outputs.finished:
            completion = self._completions.pop(end.request_id, None)
            if completion is not None:
                completion.request.metrics.num_preemptions += end.num_preemptions
                completion.finish(str(end.reason), end.stop_reason, end.is_refused)
                self._touch(completion, touched)
        for request in touched:
            request.emit(now)
            if request.num_unfinished == 0:
                self._forget(request)
        return to_abort

    def _add_tokens(
        self,
        outputs: EngineCoreOutputs,
        finished: dict[str, FinishedRequest],
        touched: dict[RequestState, None],
        now: float,
    ) -> list[str]:
        to_abort: list[str] = []
        token_ids, logprobs = outputs.token_ids, outputs.logprobs
        start = 0
        for i, completion in enumerate(self._resolve(outputs)):
            begin = start
            start += 1 if outputs.num_tokens is None else outputs.num_tokens[i]
            if completion is None or completion.finish_reason is not None:
                continue
            if completion.is_quiet:
                completion.token_ids += token_ids[begin:start]
                continue
            end = finished.get(completion.core_id) if finished else None
            if not completion.token_ids and completion.request.metrics.first_token_time is None:
                completion.request.metrics.first_token_time = now
            completion.add_tokens(
                token_ids[begin:start],
                _rows(logprobs, begin, start) if logprobs else None,
                end is not None and end.reason is FinishReason.STOP,
            )
            if completion.finish_reason is not None:
                del self._completions[completion.core_id]
                if end is None:
                    to_abort.append(completion.core_id)
            self._touch(completion, touched)
        return to_abort

    def _resolve(self, outputs: EngineCoreOutputs) -> list[CompletionState | None]:
        """While a core's batch stays the same, so does its list."""
        ids, completions = self._last.get(outputs.core, (None, []))
        if outputs.request_ids is not ids:
            completions = [self._completions.get(i) for i in outputs.request_ids]
            self._last[outputs.core] = outputs.request_ids, completions
        return completions

    @staticmethod
    def _touch(completion: CompletionState, touched: dict[RequestState, None]) -> None:
        request = completion.request
        touched[request] = None
        if completion not in request.changed:
            request.changed.append(completion)

    def abort(self, requests: Iterable[RequestState]) -> list[str]:
        """End requests with reason "abort" and tell their sinks. Returns the ids to abort in the core."""
        core_ids: list[str] = []
        for request in list(requests):
            if request.num_unfinished == 0:
                continue
            for completion in request.completions:
                if self._completions.pop(completion.core_id, None) is not None:
                    core_ids.append(completion.core_id)
                    completion.finish(str(FinishReason.ABORT), None)
                    request.changed.append(completion)
            request.emit(time.monotonic())
            self._forget(request)
        return core_ids

    def requests(self, request_id: str | None = None) -> list[RequestState]:
        """The unfinished requests, or those to which their callers gave this id."""
        if request_id is not None:
            return list(self._requests.get(request_id, ()))
        return [request for same_id in self._requests.values() for request in same_id]

    def _forget(self, request: RequestState) -> None:
        same_id = self._requests.get(request.request_id, [])
        if request in same_id:
            same_id.remove(request)
        if not same_id:
            self._requests.pop(request.request_id, None)


def _rows(logprobs: dict[int, TokenLogprobs], begin: int, end: int) -> list[TokenLogprobs] | None:
    """The logprobs of a completion's tokens, None for a completion that asked for none."""
    return [logprobs[i] for i in range(begin, end)] if begin in logprobs else None
