"""From what a caller asks to what the core can run: prompts are tokenized, everything is checked against the model."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any, NotRequired, Protocol, TypedDict

import msgspec

from jaxinfer.config import MAX_LOGIT_BIAS, MAX_LOGPROB_TOKEN_IDS, ModelConfig
from jaxinfer.engine.messages import EngineCoreRequest, Pooling, Thinking
from jaxinfer.frontend.parallel_sampling import expand
from jaxinfer.logits_processors import EXTRA_ARG, complete_request
from jaxinfer.lora_request import LoRARequest
from jaxinfer.sampling_params import SamplingParams


class TextPrompt(TypedDict):
    """Prompts with different values of `cache_salt` share nothing in the prefix cache, and so can't learn of each
    other by how soon they are answered."""

    prompt: str
    cache_salt: NotRequired[str]


class TokensPrompt(TypedDict):
    """`prompt` is carried along into the output and not tokenized. `cache_salt`: see `TextPrompt`."""

    prompt_token_ids: list[int]
    prompt: NotRequired[str]
    cache_salt: NotRequired[str]


class PromptTooLongError(ValueError):
    """The context has no room for the prompt and `num_output` tokens after it. Lengths are in tokens."""

    def __init__(self, num_tokens: int, max_model_len: int, num_output: int = 1) -> None:
        room = f"a prompt of at most {max_model_len - 1} tokens and one output token."
        if not num_output:
            room = "a prompt of at most as many; truncate_prompt_tokens cuts longer ones."
        super().__init__(
            f"The prompt has {num_tokens} tokens; max_model_len is {max_model_len}, which leaves room for {room}"
        )
        self.num_tokens = num_tokens


type Prompt = str | Sequence[int] | TextPrompt | TokensPrompt


class Encoder(Protocol):
    """What the processor needs of a tokenizer."""

    @property
    def eos_token_id(self) -> int | None: ...

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...


@dataclass(slots=True)
class PreparedRequest:
    """A valid request. `request_id` is the caller's; the core's requests, one per completion, have ids of their own,
    so that callers may use an id twice. `sampling_params` has every default filled in."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    sampling_params: SamplingParams
    arrival_time: float
    core_requests: list[EngineCoreRequest]
    core: int = 0
    """Which of several engine cores it was given to."""


class Processor:
    """Validates and tokenizes; holds no requests."""

    def __init__(
        self,
        config: ModelConfig,
        tokenizer: Encoder,
        generation_config: dict[str, Any] | None = None,
        use_generation_defaults: bool = True,
        origin: str = "",
        has_adapters: bool = False,
    ) -> None:
        """`generation_config` is the checkpoint's: its end-of-sequence ids always count, its sampling defaults when
        `use_generation_defaults`. `origin` ends all ids, where several processors send to one core."""
        self._config = config
        self._tokenizer = tokenizer
        generation_config = generation_config or {}
        self.eos_token_ids = eos_token_ids(generation_config, tokenizer, config.vocab_size)
        self.sampling_defaults = (
            _sampling_defaults(generation_config) if use_generation_defaults else {}
        )
        """By name, those that the checkpoint sets."""
        self._counter = itertools.count()
        self._origin = origin
        self._has_adapters = has_adapters

    def get_default_sampling_params(self) -> SamplingParams:
        """What applies when a caller passes no sampling parameters."""
        return SamplingParams(**self.sampling_defaults)

    def prepare(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        request_id: str | None = None,
        priority: int = 0,
        add_special_tokens: bool = True,
        thinking: Thinking | None = None,
        lora_request: LoRARequest | None = None,
    ) -> PreparedRequest:
        """Raises `ValueError` for whatever the model can't do. `add_special_tokens` is for a text prompt: False when
        it went through a chat template, which has put them already. `thinking`: a grammar begins after it."""
        arrival_time = time.monotonic()
        _check_priority(priority)
        text, token_ids = self._token_ids(prompt, add_special_tokens)
        self._check_prompt(token_ids)
        params = self._complete(params, len(token_ids))
        core_request = EngineCoreRequest(
            request_id=self._core_id(request_id),
            prompt_token_ids=token_ids,
            sampling_params=params,
            arrival_time=arrival_time,
            eos_token_ids=[] if params.ignore_eos else self.eos_token_ids,
            priority=int(priority),
            cache_salt=_cache_salt(prompt),
            grammar=_grammar(params),
            thinking=thinking,
            lora=self._checked_adapter(lora_request),
        )
        return PreparedRequest(
            request_id=core_request.request_id if request_id is None else request_id,
            prompt=text,
            prompt_token_ids=token_ids,
            sampling_params=params,
            arrival_time=arrival_time,
            core_requests=expand(core_request),
        )

    def _checked_adapter(self, adapter: LoRARequest | None) -> LoRARequest | None:
        if adapter is not None and not isinstance(adapter, LoRARequest):
            raise ValueError(f"lora_request must be a LoRARequest, got {adapter!r}.")
        if adapter is not None and not self._has_adapters:
            raise ValueError("lora_request needs an engine with enable_lora=True.")
        return adapter

    def prepare_pooling(
        self,
        prompt: Prompt,
        pooling: Pooling,
        *,
        sampling_params: SamplingParams,
        keep: int | None,
        request_id: str | None,
        priority: int,
    ) -> PreparedRequest:
        """A request for vectors; of given token ids, the last `keep` are taken. Its `sampling_params` only end it. Raises as
        `prepare`."""
        arrival_time = time.monotonic()
        _check_priority(priority)
        text, token_ids = self._token_ids(prompt, True)
        token_ids = token_ids if keep is None else token_ids[-keep:]
        self._check_prompt(token_ids, num_output=0)
        core_request = EngineCoreRequest(
            request_id=self._core_id(request_id),
            prompt_token_ids=token_ids,
            sampling_params=sampling_params,
            arrival_time=arrival_time,
            eos_token_ids=[0],  # whatever stands for the vectors, the request has ended by itself
            priority=int(priority),
            cache_salt=_cache_salt(prompt),
            pooling=pooling,
        )
        return PreparedRequest(
            request_id=core_request.request_id if request_id is None else request_id,
            prompt=text,
            prompt_token_ids=token_ids,
            sampling_params=sampling_params,
            arrival_time=arrival_time,
            core_requests=[core_request],
        )

    def _core_id(self, request_id: str | None) -> str:
        number = f"{next(self._counter)}{self._origin}"
        # The core names its requests whenever the batch changes: a client's long id must not cost everybody.
        return number if request_id is None else f"{request_id[:64]}#{number}"

    def _token_ids(self, prompt: Prompt, add_special_tokens: bool) -> tuple[str | None, list[int]]:
        if isinstance(prompt, str):
            if not prompt:
                raise ValueError("prompt must not be empty.")
            ids = self._tokenizer.encode(prompt, add_special_tokens=add_special_tokens)
            return prompt, list(ids)
        if isinstance(prompt, dict):
            if "prompt_token_ids" in prompt:
                text = prompt.get("prompt")
                if text is not None and not isinstance(text, str):
                    raise ValueError(f"prompt must be a string, got {text!r}.")
                return text, _ids(prompt["prompt_token_ids"])
            if isinstance(prompt.get("prompt"), str):
                return self._token_ids(prompt["prompt"], add_special_tokens)
            raise ValueError(
                f"A prompt given as a dict needs 'prompt' or 'prompt_token_ids', got {prompt!r}."
            )
        return None, _ids(prompt)

    def _check_prompt(self, token_ids: list[int], num_output: int = 1) -> None:
        if not token_ids:
            raise ValueError("prompt must not be empty: it holds no tokens.")
        vocab_size = self._config.vocab_size
        low, high = min(token_ids), max(token_ids)
        if low < 0 or high >= vocab_size:
            raise ValueError(
                f"prompt_token_ids must be in [0, {vocab_size - 1}], the model's vocabulary, "
                f"got {low if low < 0 else high}."
            )
        max_len = self._config.max_model_len
        if len(token_ids) + num_output > max_len:
            raise PromptTooLongError(len(token_ids), max_len, num_output)

    def _complete(self, params: SamplingParams | None, prompt_len: int) -> SamplingParams:
        """A copy, validated again (callers may have changed fields), in which nothing is left open."""
        if params is None:
            params = self.get_default_sampling_params()
        if not isinstance(params, SamplingParams):
            raise ValueError(f"sampling_params must be SamplingParams, got {params!r}.")
        complete = msgspec.structs.replace(params)
        room = self._config.max_model_len - prompt_len
        complete.max_tokens = room if params.max_tokens is None else min(params.max_tokens, room)
        complete.min_tokens = min(params.min_tokens, room)
        complete.logprobs = self._num_logprobs("logprobs", params.logprobs)
        if params.logprob_token_ids is not None:
            complete.logprobs = self._num_given_logprobs(params.logprob_token_ids)
        complete.prompt_logprobs = self._num_logprobs("prompt_logprobs", params.prompt_logprobs)
        if params.extra_args is not None:
            asked = complete_request(params.extra_args, self._config.logits_processors)
            complete.extra_args = {EXTRA_ARG: asked} if asked else None
        if params.bad_words:
            complete.bad_words_token_ids = self._bad_words(params.bad_words)
        if params.greedy:
            # They don't change the likeliest token, and the sampler needn't spend time on them.
            complete.top_p, complete.top_k, complete.min_p = 1.0, 0, 0.0
        self._check_token_rules(complete)
        return complete

    def _num_logprobs(self, name: str, value: int | None) -> int | None:
        if value is None:
            return None
        wanted = self._config.vocab_size if value == -1 else value
        if wanted > self._config.max_logprobs:
            what = f"-1, the whole vocabulary of {wanted}" if value == -1 else f"{wanted}"
            raise ValueError(
                f"{name} must be at most max_logprobs ({self._config.max_logprobs}), got {what}."
            )
        return wanted

    def _num_given_logprobs(self, token_ids: list[int]) -> int:
        limit = min(self._config.max_logprobs, MAX_LOGPROB_TOKEN_IDS)
        if len(token_ids) > limit:
            raise ValueError(
                f"logprob_token_ids may hold at most {limit} tokens (max_logprobs is {self._config.max_logprobs}), "
                f"got {len(token_ids)}."
            )
        return len(token_ids)

    def _check_token_rules(self, params: SamplingParams) -> None:
        self._check_ids("logit_bias", params.logit_bias)
        self._check_ids("stop_token_ids", params.stop_token_ids)
        self._check_ids("allowed_token_ids", params.allowed_token_ids)
        self._check_ids("logprob_token_ids", params.logprob_token_ids)
        for ids in params.bad_words_token_ids or ():
            self._check_ids("bad_words", ids)
        if params.logit_bias and len(params.logit_bias) > MAX_LOGIT_BIAS:
            raise ValueError(
                f"logit_bias may hold at most {MAX_LOGIT_BIAS} entries, got {len(params.logit_bias)}."
            )

    def _check_ids(self, name: str, token_ids: Iterable[int] | None) -> None:
        vocab_size = self._config.vocab_size
        for token_id in token_ids or ():
            if not 0 <= token_id < vocab_size:
                raise ValueError(
                    f"{name} holds token id {token_id}, outside the model's vocabulary [0, {vocab_size - 1}]."
                )

    def _bad_words(self, words: Iterable[str]) -> list[list[int]]:
        """Each word as it is tokenized at the start of a text and after a space. Where the second is only the first
        after another token, forbidding the first is enough."""
        sequences: list[list[int]] = []
        for word in words:
            bare = self._tokenizer.encode(word.lstrip(), add_special_tokens=False)
            spaced = self._tokenizer.encode(" " + word.lstrip(), add_special_tokens=False)
            if not bare:
                raise ValueError(f"bad_words holds {word!r}, which the tokenizer maps to no token.")
            sequences.append(bare)
            if spaced[-len(bare) :] != bare:
                sequences.append(spaced)
        return sequences


def _check_priority(priority: int) -> None:
    if isinstance(priority, bool) or not isinstance(priority, Integral):
        raise ValueError(f"priority must be an integer, got {priority!r}.")


def _grammar(params: SamplingParams) -> str | None:
    if params.structured_outputs is None:
        return None
    from jaxinfer.frontend.grammar import grammar_of

    return grammar_of(params.structured_outputs)


def _cache_salt(prompt: Prompt) -> str | None:
    salt = prompt.get("cache_salt") if isinstance(prompt, dict) else None
    if salt is not None and (not isinstance(salt, str) or not salt):
        raise ValueError(f"cache_salt must be a non-empty string, got {salt!r}.")
    return salt


def _ids(values: Any) -> list[int]:
    if isinstance(values, str | bytes) or not isinstance(values, Iterable):
        raise ValueError(
            f"prompt must be a string, a list of token ids, or a dict of one of them, got {values!r}."
        )
    ids = list(values)
    for i, value in enumerate(ids):
        if type(value) is not int:
            if isinstance(value, bool) or not isinstance(value, Integral):
                raise ValueError(f"prompt_token_ids[{i}] must be an integer, got {value!r}.")
            ids[i] = int(value)
    return ids


def eos_token_ids(
    generation_config: dict[str, Any], tokenizer: Encoder, vocab_size: int
) -> list[int]:
    """The tokens that end an output: the checkpoint's, and the tokenizer's own."""
    configured = generation_config.get("eos_token_id")
    ids = configured if isinstance(configured, list) else [configured]
    unique = dict.fromkeys([*ids, tokenizer.eos_token_id])
    return [i for i in unique if i is not None and 0 <= i < vocab_size]


def _sampling_defaults(generation_config: dict[str, Any]) -> dict[str, Any]:
    """Generation configs write null for what they leave open."""
    names = {
        name: name for name in ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
    } | {"max_new_tokens": "max_tokens"}
    return {
        ours: generation_config[theirs]
        for theirs, ours in names.items()
        if generation_config.get(theirs) is not None
    }
