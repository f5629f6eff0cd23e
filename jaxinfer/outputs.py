"""What a request answers with: vLLM's names and fields."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(slots=True)
class Logprob:
    """One candidate at one position. `rank` counts from 1, the most likely token.

    `decoded_token` is the text the token adds after what precedes it: empty while it only begins a character, and
    the whole character for the token that completes it. None when the request asked for no text.
    """

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


type PositionLogprobs = dict[int, Logprob]
"""By token id: the chosen token first, then the candidates, best first."""


@dataclass(slots=True)
class CompletionOutput:
    """One completion. With output kind DELTA, text, token_ids and logprobs hold only what is new.

    `finish_reason` is None while it runs, then "stop", "length", "abort" or "error"; `stop_reason` is the stop
    string or stop token id that ended it, None for the end-of-sequence token, or the error's text. `is_refused`: that
    error is the request's own doing, not the engine's.
    `cumulative_logprob` sums the whole completion's logprobs, when logprobs were asked for. `logprobs` is a list, or
    with `flat_logprobs` a `FlatLogprobs`.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: Sequence[PositionLogprobs] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    is_refused: bool = False

    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestMetrics:
    """When things happened to a request, in seconds of `time.monotonic`; None is not yet.

    With several completions, the first to be scheduled and to get a token counts, and the last to end; preemptions
    are those of all. `max_num_generation_tokens` are the longest one's, known at the end.

    Of `num_draft_tokens` that were guessed for the request, `num_accepted_tokens` were right (`speculative_config`).
    """

    arrival_time: float
    queued_time: float | None = None
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    last_token_time: float | None = None
    finished_time: float | None = None
    num_generation_tokens: int = 0
    max_num_generation_tokens: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_preemptions: int = 0

    @property
    def time_in_queue(self) -> float | None:
        if self.first_scheduled_time is None or self.queued_time is None:
            return None
        return self.first_scheduled_time - self.queued_time

    @property
    def time_to_first_token(self) -> float | None:
        if self.first_token_time is None:
            return None
        return self.first_token_time - self.arrival_time

    @property
    def e2e_latency(self) -> float | None:
        return None if self.finished_time is None else self.finished_time - self.arrival_time


@dataclass(slots=True)
class RequestOutput:
    """The state of a request: its prompt and its completions.

    `prompt` is None when the prompt was given as ids. `prompt_logprobs` has one entry per prompt token, None for
    the first. With output kind DELTA, `outputs` holds only completions that changed, and `prompt_logprobs` comes
    once. `num_cached_tokens` of the prompt were in the prefix cache when its first completion began. A request for
    vectors has them in `pooled`, and a completion without tokens.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    prompt_logprobs: Sequence[PositionLogprobs | None] | None = None
    metrics: RequestMetrics | None = None
    num_cached_tokens: int = 0
    pooled: np.ndarray | None = None

    def add(self, later: RequestOutput) -> None:
        """Append the next DELTA output of the same request to this one, as if both had come at once."""
        by_index = {output.index: output for output in self.outputs}
        for new in later.outputs:
            mine = by_index.get(new.index)
            if mine is None:
                self.outputs.append(new)
                continue
            mine.text += new.text
            mine.token_ids += new.token_ids
            if new.logprobs:
                mine.logprobs = mine.logprobs + new.logprobs if mine.logprobs else new.logprobs  # type: ignore[operator]
            mine.cumulative_logprob = new.cumulative_logprob
            mine.finish_reason = new.finish_reason
            mine.stop_reason = new.stop_reason
            mine.is_refused = new.is_refused
        self.finished = later.finished
        self.metrics = later.metrics
        self.num_cached_tokens = max(self.num_cached_tokens, later.num_cached_tokens)
        if self.prompt_logprobs is None:
            self.prompt_logprobs = later.prompt_logprobs


class RequestFailedError(RuntimeError):
    """Some requests of a batch failed inside the engine; the others finished.

    `failures` maps the index of a prompt to the reason; `outputs` holds every prompt's output, failed or not.
    """

    def __init__(self, failures: dict[int, str], outputs: list[RequestOutput]) -> None:
        self.failures = failures
        self.outputs = outputs
        reasons = "; ".join(f"prompt {i}: {reason}" for i, reason in failures.items())
        self.is_refused = all(
            completion.is_refused
            for output in outputs
            for completion in output.outputs
            if completion.finish_reason == "error"
        )
        """Whether all of them failed by their own doing."""
        super().__init__(f"{len(failures)} of {len(outputs)} requests failed: {reasons}")
