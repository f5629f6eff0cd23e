"""What crosses the line between the frontend and the engine core.

Everything here is plain data (msgspec structs of ints, strings, lists), so that the core may live in this process
or in another one without the rest noticing.
"""

from __future__ import annotations

import enum
from typing import Literal

import msgspec

from jaxinfer.engine.stats import SchedulerStats
from jaxinfer.lora_request import LoRARequest
from jaxinfer.sampling_params import SamplingParams


class FinishReason(enum.IntEnum):
    """Why a request ended. `str()` gives the word of the OpenAI API."""

    STOP = 0
    LENGTH = 1
    ABORT = 2
    ERROR = 3

    def __str__(self) -> str:
        return self.name.lower()


class Thinking(msgspec.Struct, array_like=True):
    """That the model thinks before it answers, between two tokens. `has_begun`: the output begins with thoughts; otherwise
    it does if its first token is `start_token`. After `max_tokens` of them, both tokens not counted, the end is forced.
    """

    start_token: int
    end_token: int
    has_begun: bool
    max_tokens: int | None = None


type PoolingTask = Literal["embed", "classify", "token_embed", "token_classify"]
"""What becomes of a prompt's last hidden states: one vector of all of them, or one of each; as the model has it, or through
its classification head."""


class Pooling(msgspec.Struct, array_like=True):
    """That a request wants vectors and no tokens. In a pair of texts, tokens from the index `second_text` on are of the
    second."""

    task: PoolingTask
    second_text: int | None = None


class EngineCoreRequest(msgspec.Struct, array_like=True, omit_defaults=True):
    """A validated, tokenized request.

    `eos_token_ids` end the request with reason "stop" (empty when the request ignores them);
    `sampling_params.stop_token_ids` do as well and are reported as the stop reason. Stop *strings* are the
    frontend's business: it aborts the request here when one appears. Only requests of the same `cache_salt` share
    cached prefixes. The output follows `grammar`, in the notation of the grammar backend; with `thinking`, what comes
    after the thoughts does. The model runs with the adapter `lora`. With `pooling` the request ends once its prompt is
    computed.
    """

    request_id: str
    prompt_token_ids: list[int]
    sampling_params: SamplingParams
    arrival_time: float
    eos_token_ids: list[int] = []
    priority: int = 0
    cache_salt: str | None = None
    grammar: str | None = None
    thinking: Thinking | None = None
    lora: LoRARequest | None = None
    pooling: Pooling | None = None


class Pooled(msgspec.Struct, array_like=True):
    """A float32 array."""

    shape: list[int]
    data: bytes


class TokenLogprobs(msgspec.Struct, array_like=True):
    """Logprobs of one position: the chosen token first, then the top candidates, best first.

    `rank` is the chosen token's rank in the vocabulary, 1 for the most likely one.
    """

    token_ids: list[int]
    logprobs: list[float]
    rank: int


class FinishedRequest(msgspec.Struct, array_like=True):
    """A request's end. `stop_reason` is the stop token's id when one ended it, or an error's text. `is_refused`: the
    error is the request's own doing. It was preempted `num_preemptions` times."""

    request_id: str
    reason: FinishReason
    stop_reason: int | str | None = None
    is_refused: bool = False
    num_preemptions: int = 0


class Admission(msgspec.Struct, array_like=True):
    """When the core first admitted a request to a step (`time.monotonic` seconds), and how many tokens of its prompt
    were in the prefix cache."""

    request_id: str
    scheduled: float
    num_cached_tokens: int = 0


class EngineCoreOutputs(msgspec.Struct, array_like=True):
    """What one step brought, by column: `token_ids[i]` is the new token of `request_ids[i]`. Not to be changed: the
    core hands out the same list of ids as long as the batch stays the same.

    When a step can bring several tokens for a request, `num_tokens[i]` says how many of the flat `token_ids`
    belong to `request_ids[i]`. `num_drafted` (by request) says how many tokens were guessed for it and how many of
    them were right. `pooled` (by request) is what a request with `pooling` is for. `logprobs` (by index into `token_ids`) and `prompt_logprobs` (by request, the next
    positions of its prompt) hold only what was asked for. `finished` may name requests that got no token. `core` says
    which of several cores took the step.
    """

    request_ids: list[str] = []
    token_ids: list[int] = []
    num_tokens: list[int] | None = None
    logprobs: dict[int, TokenLogprobs] = {}
    prompt_logprobs: dict[str, list[TokenLogprobs]] = {}
    finished: list[FinishedRequest] = []
    first_scheduled: list[Admission] = []
    timestamp: float = 0.0
    stats: SchedulerStats | None = None
    num_drafted: dict[str, tuple[int, int]] = {}
    core: int = 0
    pooled: dict[str, Pooled] = {}

    @property
    def is_empty(self) -> bool:
        """Nothing that a request would have to hear of."""
        return not (
            self.request_ids or self.finished or self.first_scheduled or self.prompt_logprobs
        )
