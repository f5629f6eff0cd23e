"""What the frontend keeps of an unfinished request: its prompt, and per completion the tokens and text so far."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from jaxinfer.engine.messages import TokenLogprobs
from jaxinfer.frontend.detokenizer import Detokenizer
from jaxinfer.frontend.logprobs import LogprobHistory, logprob_history
from jaxinfer.frontend.processor import PreparedRequest
from jaxinfer.frontend.token_text import TokenText
from jaxinfer.outputs import (
    CompletionOutput,
    RequestMetrics,
    RequestOutput,
)
from jaxinfer.sampling_params import RequestOutputKind

Sink = Callable[[RequestOutput], None]


class CompletionState:
    """One completion. `is_quiet`: its tokens only need to be collected until it ends."""

    __slots__ = ("_cumulative_logprob", "_detokenizer", "_is_incremental", "_is_refused")
    __slots__ += ("_logprobs", "_num_sent", "_stream_index", "_text", "core_id", "finish_reason")
    __slots__ += ("index", "is_quiet", "request", "stop_reason", "token_ids")

    def __init__(
        self, core_id: str, index: int, request: RequestState, token_text: TokenText
    ) -> None:
        params = request.params
        self.core_id = core_id
        self.index = index
        self.request = request
        self.token_ids: list[int] = []
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self._is_refused = False
        self._detokenizer: Detokenizer | None = None
        self._text = ""
        self._num_sent = 0
        self._logprobs: LogprobHistory | None = None
        self._cumulative_logprob = 0.0
        if params.detokenize:
            stream = token_text.stream(request.prompt_token_ids, params.skip_special_tokens)
            self._detokenizer = Detokenizer(stream, params)
        if params.logprobs is not None:
            self._logprobs = logprob_history(
                token_text if params.detokenize else None,
                request.prompt_token_ids,
                flat=params.flat_logprobs,
                ranked=params.logprob_token_ids is None,
            )
        is_final_only = request.kind is RequestOutputKind.FINAL_ONLY
        self._is_incremental = bool(params.stop_strings) or not is_final_only
        self.is_quiet = False

    def add_tokens(
        self,
        token_ids: Sequence[int],
        logprobs: Sequence[TokenLogprobs] | None,
        ends_with_stop_token: bool,
    ) -> None:
        """Take a step's new tokens; a stop string among them ends the completion."""
        used = len(token_ids)
        if self._is_incremental and self._detokenizer is not None:
            in_text = self._without_stop_token(token_ids) if ends_with_stop_token else token_ids
            hit = self._detokenizer.push(in_text)
            if hit is not None:
                used, self.stop_reason = hit
                self.finish_reason = "stop"
                self.request.num_unfinished -= 1
        self.token_ids += token_ids[:used]
        if self._logprobs is not None and logprobs is not None:
            self._logprobs.add(logprobs[:used])
            for scored in logprobs[:used]:
                self._cumulative_logprob += scored.logprobs[0]
        is_final_only = self.request.kind is RequestOutputKind.FINAL_ONLY
        self.is_quiet = is_final_only and not self._is_incremental and self._logprobs is None

    def _without_stop_token(self, token_ids: Sequence[int]) -> Sequence[int]:
        include = self.request.params.include_stop_str_in_output
        return token_ids if include else token_ids[:-1]

    def finish(self, reason: str, stop_reason: int | str | None, is_refused: bool = False) -> None:
        """End for any other reason than a stop string: what was held of the text comes out."""
        self.finish_reason = reason
        self.stop_reason = stop_reason
        self._is_refused = is_refused
        self.request.num_unfinished -= 1
        if self._detokenizer is not None:
            if not self._is_incremental:
                ended_by_token = reason == "stop"
                ids = self.token_ids
                self._detokenizer.push(self._without_stop_token(ids) if ended_by_token else ids)
            self._detokenizer.finish()

    def output(self, is_delta: bool) -> CompletionOutput:
        text = "" if self._detokenizer is None else self._detokenizer.take()
        start = 0
        if is_delta:
            start, self._num_sent = self._num_sent, len(self.token_ids)
        else:
            text = self._text = self._text + text
        has_logprobs = self._logprobs is not None
        return CompletionOutput(
            index=self.index,
            text=text,
            token_ids=self.token_ids[start:],
            cumulative_logprob=self._cumulative_logprob if has_logprobs else None,
            logprobs=self._logprobs.since(start) if self._logprobs is not None else None,
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            is_refused=self._is_refused,
        )


class RequestState:
    """A request with its completions. `request_id` is the caller's; the core knows only the completions' ids."""

    __slots__ = ("_prompt_logprobs", "changed", "completions", "kind", "metrics")
    __slots__ += ("num_cached_tokens", "num_unfinished", "params", "pooled", "prompt")
    __slots__ += ("prompt_token_ids", "request_id", "sink")

    def __init__(
        self,
        prepared: PreparedRequest,
        token_text: TokenText,
        kind: RequestOutputKind,
        sink: Sink,
        now: float,
    ) -> None:
        self.request_id = prepared.request_id
        self.prompt = prepared.prompt
        self.prompt_token_ids = prepared.prompt_token_ids
        self.params = prepared.sampling_params
        self.kind = kind
        self.sink = sink
        self.metrics = RequestMetrics(prepared.arrival_time, queued_time=now)
        self.completions = [
            CompletionState(core.request_id, i, self, token_text)
            for i, core in enumerate(prepared.core_requests)
        ]
        self.pooled: np.ndarray | None = None
        self.num_cached_tokens = 0
        self.num_unfinished = len(self.completions)
        self.changed: list[CompletionState] = []
        """Completions with news since the last output."""
        self._prompt_logprobs: LogprobHistory | None = None
        if self.params.prompt_logprobs is not None:
            self._prompt_logprobs = logprob_history(
                token_text if self.params.detokenize else None,
                self.prompt_token_ids[:1],
                flat=self.params.flat_logprobs,
                is_prompt=True,
            )

    def add_prompt_logprobs(self, positions: Sequence[TokenLogprobs]) -> None:
        if self._prompt_logprobs is not None:
            self._prompt_logprobs.add(positions)

    def emit(self, now: float) -> None:
        """Give the sink what is due: nothing yet for a FINAL_ONLY request that still runs."""
        changed, self.changed = self.changed, []
        finished = self.num_unfinished == 0
        if self.kind is RequestOutputKind.FINAL_ONLY and not finished:
            return
        metrics = self.metrics
        num_tokens = sum([len(c.token_ids) for c in self.completions])
        if num_tokens > metrics.num_generation_tokens:
            metrics.last_token_time = now
            metrics.num_generation_tokens = num_tokens
        if finished:
            metrics.finished_time = now
            metrics.max_num_generation_tokens = max(len(c.token_ids) for c in self.completions)
        is_delta = self.kind is RequestOutputKind.DELTA
        prompt_logprobs = self._prompt_logprobs
        if is_delta:
            self._prompt_logprobs = None
        self.sink(
            RequestOutput(
                request_id=self.request_id,
                prompt=self.prompt,
                prompt_token_ids=self.prompt_token_ids,
                outputs=[c.output(is_delta) for c in (changed if is_delta else self.completions)],
                finished=finished,
                prompt_logprobs=prompt_logprobs and prompt_logprobs.since(0),
                metrics=metrics,
                num_cached_tokens=self.num_cached_tokens,
                pooled=self.pooled,
            )
        )
