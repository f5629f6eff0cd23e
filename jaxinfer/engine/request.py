"""A request inside the core: its prompt, its parameters, and where it stands."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING

import numpy as np

from jaxinfer.config import ModelConfig
from jaxinfer.engine.block_hash import BlockKey
from jaxinfer.engine.messages import EngineCoreRequest
from jaxinfer.engine.plan import Int32, Words
from jaxinfer.engine.thinking import ThinkingMatcher

if TYPE_CHECKING:
    from jaxinfer.engine.grammars import Matcher

NO_ROW = -1


class RequestState(enum.IntEnum):
    COMPILING = 0
    """Its grammar is."""
    WAITING = 1
    RUNNING = 2
    PREEMPTED = 3
    FINISHED = 4


class Request:
    """While it runs, a request's numbers live in the row table; here is what lasts longer than its row.

    `output_token_ids` is current except while the request runs. `num_in_flight` counts the tokens that were being
    sampled when it was preempted. `max_total_tokens` bounds prompt and output together. `block_keys` are the keys of
    its first full blocks, as many as somebody has asked for; `num_cached_tokens` were found in the cache when it was
    last admitted. `num_overtaken` counts the requests that were admitted before it though they stood behind it.
    `matcher` follows its grammar, and has accepted all of its output that has been read. `adapter` is the key of the content
    that `lora` names (see `Adapters`), and `adapter_slot` where that is while it runs.
    """

    __slots__ = (
        "adapter",
        "adapter_slot",
        "allowed_words",
        "arrival_index",
        "arrival_time",
        "bad_sequences",
        "block_keys",
        "cache_salt",
        "eos_token_ids",
        "is_guided",
        "lora",
        "matcher",
        "max_total_tokens",
        "min_tokens",
        "num_cached_tokens",
        "num_in_flight",
        "num_overtaken",
        "num_preemptions",
        "num_prompt_logprobs_sent",
        "output_token_ids",
        "pooling",
        "priority",
        "prompt_token_ids",
        "reads_prefix_cache",
        "request_id",
        "row",
        "sampling_params",
        "state",
        "stop_token_ids",
        "thinking",
    )

    def __init__(
        self,
        message: EngineCoreRequest,
        model: ModelConfig,
        arrival_index: int,
        adapter: str | None = None,
    ) -> None:
        params = message.sampling_params
        num_prompt = len(message.prompt_token_ids)
        self.request_id = message.request_id
        self.prompt_token_ids: Int32 = np.array(message.prompt_token_ids, np.int32)
        self.sampling_params = params
        self.priority = message.priority
        self.arrival_time = message.arrival_time
        self.arrival_index = arrival_index
        self.cache_salt = message.cache_salt
        self.lora = message.lora
        self.adapter = adapter
        self.adapter_slot = 0
        # Logprobs of the prompt come from computing it.
        self.reads_prefix_cache = not params.skip_reading_prefix_cache and (
            params.prompt_logprobs is None
        )
        self.eos_token_ids = frozenset(message.eos_token_ids)
        self.stop_token_ids = frozenset(params.stop_token_ids or ())
        self.min_tokens = params.min_tokens
        self.pooling = message.pooling
        self.max_total_tokens = model.max_model_len
        if params.max_tokens is not None:
            self.max_total_tokens = min(model.max_model_len, num_prompt + params.max_tokens)
        if self.pooling is not None:
            # Its one token stands for the vectors and takes no place.
            self.max_total_tokens = num_prompt + 1

        self.thinking = message.thinking
        self.is_guided = message.grammar is not None or message.thinking is not None
        self.matcher: Matcher | None = None
        if message.grammar is None:
            self.follow(None)

        self.state = RequestState.WAITING if message.grammar is None else RequestState.COMPILING
        self.row = NO_ROW
        self.output_token_ids: Int32 = np.empty(0, np.int32)
        self.block_keys: list[BlockKey] = []
        self.num_cached_tokens = 0
        self.num_in_flight = 0
        self.num_overtaken = 0
        self.num_preemptions = 0
        self.num_prompt_logprobs_sent = 0
        self.allowed_words: Words | None = None
        bad_words = params.bad_words_token_ids or []
        self.bad_sequences = [word for word in bad_words if len(word) > 1]

    def follow(self, grammar: Matcher | None) -> None:
        """Hold the output to a grammar, and to what is said of the model's thoughts."""
        self.matcher = grammar
        if self.thinking is not None:
            stops = self.eos_token_ids | self.stop_token_ids
            self.matcher = ThinkingMatcher(self.thinking, grammar, stops)

    @property
    def num_known_tokens(self) -> int:
        """Prompt and output; only while the request doesn't run."""
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    @property
    def rank(self) -> tuple[int, float, int]:
        """Under the priority policy, lower comes first."""
        return self.priority, self.arrival_time, self.arrival_index

    @property
    def always_masked(self) -> bool:
        """Whether only some tokens may be sampled, at any length of the output."""
        params = self.sampling_params
        return (
            self.is_guided
            or params.allowed_token_ids is not None
            or bool(params.bad_words_token_ids)
        )

    @property
    def known_token_ids(self) -> Int32:
        """Prompt and output; only while the request doesn't run."""
        if not len(self.output_token_ids):
            return self.prompt_token_ids
        return np.concatenate([self.prompt_token_ids, self.output_token_ids])


def check_request(message: EngineCoreRequest, model: ModelConfig) -> None:
    """Raises `ValueError` for what the scheduler can't serve. The frontend explains more; this is the last line."""
    num_prompt = len(message.prompt_token_ids)
    max_tokens = message.sampling_params.max_tokens
    if not num_prompt:
        raise ValueError(f"prompt_token_ids of request {message.request_id!r} is empty.")
    if message.pooling is not None and num_prompt <= model.max_model_len:
        return
    if num_prompt >= model.max_model_len:
        raise ValueError(
            f"prompt_token_ids of request {message.request_id!r} has {num_prompt} tokens, which leaves no room for "
            f"an output within max_model_len ({model.max_model_len}); use at most {model.max_model_len - 1}."
        )
    if max_tokens is not None and max_tokens < 1:
        raise ValueError(
            f"max_tokens of request {message.request_id!r} must be at least 1, got {max_tokens}."
        )
