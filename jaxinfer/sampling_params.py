"""How the tokens of one request are chosen: vLLM's names, meanings and defaults."""

from __future__ import annotations

import enum
import logging
import math
from collections.abc import Iterable
from numbers import Integral, Real
from typing import Any

import msgspec

from jaxinfer.logits_processors import EXTRA_ARG
from jaxinfer.structured_outputs import StructuredOutputsParams

logger = logging.getLogger(__name__)

_GREEDY_BELOW = 1e-5
"""Temperatures below this are greedy: logits divided by it are still finite float32 numbers."""
_MIN_TEMPERATURE = 1e-2
"""Smaller temperatures that are not greedy are raised to this, where float32 softmax is still accurate."""
MAX_STOP_STRINGS = 64
MAX_N = 16384
_INT32_MAX = 2**31 - 1
_INT64_MIN, _INT64_MAX = -(2**63), 2**63 - 1


class RequestOutputKind(enum.IntEnum):
    """What each streamed `RequestOutput` holds: all so far, only what is new, or one output at the end."""

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


class SamplingParams(msgspec.Struct, omit_defaults=True, dict=True):
    """Sampling parameters of a request. Each field is validated on construction (`ValueError`).

    Args:
        n: Number of completions for the prompt; completion i of a seeded request uses `seed + i`.
        presence_penalty: Subtracted once from the logit of each token already in the output, in [-2, 2].
        frequency_penalty: Subtracted per occurrence in the output, in [-2, 2].
        repetition_penalty: Divides (positive) or multiplies (negative) logits of tokens in prompt or output; > 0.
        temperature: 0 is greedy; anything else below 0.01 is taken as 0.01.
        top_p: Keep the smallest set of tokens whose probabilities sum to at least this, in (0, 1].
        top_k: Keep the k most likely tokens; 0 or -1 keeps all.
        min_p: Keep tokens at least this fraction as likely as the likeliest one, in [0, 1].
        seed: The same seed gives the same tokens, whoever shares the batch. -1 is no seed.
        stop: Strings that end the output; not part of the text unless `include_stop_str_in_output`.
        stop_token_ids: Token ids that end the output and stay part of its ids.
        ignore_eos: Generate on after the model's end-of-sequence token.
        max_tokens: Upper bound of the output; None is as many as the context holds.
        min_tokens: No stop token may be sampled, and no stop string ends the output, before this many tokens.
        logprobs: Report this many top logprobs per output token and the sampled one's; -1 is the whole vocabulary.
        prompt_logprobs: The same for the prompt's tokens.
        logprob_token_ids: Report the logprobs of these tokens at each output position, instead of the top ones, and the
            sampled one's. Their ranks are not known.
        flat_logprobs: Report logprobs, of prompt and output, as `FlatLogprobs`: arrays instead of a dict per position.
        detokenize: Whether to produce text.
        skip_special_tokens: Leave special tokens out of the text.
        spaces_between_special_tokens: Accepted because vLLM has it; without effect, as fast tokenizers put none.
        include_stop_str_in_output: Keep the stop string, or the text of the stop token, in the text.
        output_kind: What streamed outputs hold; `LLM.generate` always returns final outputs.
        logit_bias: Added to the logits of these token ids, clamped to [-100, 100].
        allowed_token_ids: Only these may be sampled.
        bad_words: Words whose token sequences are never completed.
        extra_args: `{"logits_processors": {name: {parameter: number}}}`: custom processors of the engine that change
            this request's logits.
        structured_outputs: What the output has to look like: a JSON schema, a regular expression …
        skip_reading_prefix_cache: Compute the whole prompt, whatever of it is cached. Default (None): only where
            `prompt_logprobs` makes that necessary.
    """

    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logprob_token_ids: list[int] | None = None
    flat_logprobs: bool = False
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    bad_words_token_ids: list[list[int]] | None = None
    """Set by the frontend from `bad_words`: every way each word is tokenized."""
    skip_reading_prefix_cache: bool | None = None
    structured_outputs: StructuredOutputsParams | None = None
    extra_args: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        self.n = check_integer("n", self.n, 1, MAX_N)
        self.presence_penalty = check_real("presence_penalty", self.presence_penalty, -2.0, 2.0)
        self.frequency_penalty = check_real("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        self.repetition_penalty = check_real("repetition_penalty", self.repetition_penalty, 0.0)
        if self.repetition_penalty == 0:
            raise ValueError("repetition_penalty must be greater than 0, got 0.")
        self.temperature = check_real("temperature", self.temperature, 0.0)
        self.top_p = check_real("top_p", self.top_p, 0.0, 1.0)
        if self.top_p == 0:
            raise ValueError("top_p must be in (0, 1], got 0.")
        self.top_k = check_integer("top_k", self.top_k, -1, _INT32_MAX)
        self.min_p = check_real("min_p", self.min_p, 0.0, 1.0)
        self._check_lengths()
        self._check_stops()
        self._check_token_rules()
        self._check_structured_outputs()
        if self.extra_args is not None and not isinstance(self.extra_args, dict):
            raise ValueError(f"extra_args must be a dict, got {self.extra_args!r}.")
        for name in (
            "ignore_eos",
            "flat_logprobs",
            "detokenize",
            "skip_special_tokens",
            "spaces_between_special_tokens",
            "include_stop_str_in_output",
        ):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be True or False, got {getattr(self, name)!r}.")
        skip_reading = self.skip_reading_prefix_cache
        if skip_reading is not None and not isinstance(skip_reading, bool):
            raise ValueError(
                f"skip_reading_prefix_cache must be True, False or None, got {skip_reading!r}."
            )
        try:
            self.output_kind = RequestOutputKind(self.output_kind)
        except ValueError:
            raise ValueError(
                f"output_kind must be a RequestOutputKind, got {self.output_kind!r}."
            ) from None
        if self.stop and not self.detokenize:
            raise ValueError("stop strings need detokenize=True, got detokenize=False.")
        if self.greedy and self.n > 1:
            raise ValueError(
                f"n must be 1 with temperature 0 (all completions would be equal), got {self.n}."
            )
        if not self.greedy and self.temperature < _MIN_TEMPERATURE:
            logger.warning("temperature %g is raised to %g.", self.temperature, _MIN_TEMPERATURE)
            self.temperature = _MIN_TEMPERATURE

    def _check_lengths(self) -> None:
        if self.max_tokens is not None:
            self.max_tokens = check_integer("max_tokens", self.max_tokens, 1, _INT32_MAX)
        self.min_tokens = check_integer("min_tokens", self.min_tokens, 0, _INT32_MAX)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(
                f"min_tokens must be at most max_tokens ({self.max_tokens}), got {self.min_tokens}."
            )
        if self.logprobs is not None:
            self.logprobs = check_integer("logprobs", self.logprobs, -1, _INT32_MAX)
        if self.prompt_logprobs is not None:
            self.prompt_logprobs = check_integer(
                "prompt_logprobs", self.prompt_logprobs, -1, _INT32_MAX
            )
        if self.seed is not None:
            self.seed = check_integer("seed", self.seed, _INT64_MIN, _INT64_MAX)
            if self.seed == -1:
                self.seed = None

    def _check_stops(self) -> None:
        if self.stop is not None and not isinstance(self.stop, str):
            self.stop = _strings("stop", self.stop)
            if len(self.stop) > MAX_STOP_STRINGS:
                raise ValueError(
                    f"stop may hold at most {MAX_STOP_STRINGS} strings, got {len(self.stop)}."
                )
        elif self.stop == "":
            raise ValueError("stop must not be an empty string.")
        if self.stop_token_ids is not None:
            self.stop_token_ids = _token_ids("stop_token_ids", self.stop_token_ids)

    def _check_token_rules(self) -> None:
        if self.logit_bias is not None:
            self.logit_bias = _logit_bias(self.logit_bias)
        if self.allowed_token_ids is not None:
            self.allowed_token_ids = _token_ids("allowed_token_ids", self.allowed_token_ids)
            if not self.allowed_token_ids:
                raise ValueError("allowed_token_ids must not be empty: nothing could be sampled.")
        if self.logprob_token_ids is not None:
            given = _token_ids("logprob_token_ids", self.logprob_token_ids)
            self.logprob_token_ids = list(dict.fromkeys(given)) or None
        if self.bad_words is not None:
            self.bad_words = _strings("bad_words", self.bad_words)
            if not all(word.strip() for word in self.bad_words):
                raise ValueError("bad_words must not hold a blank string.")
        if self.bad_words_token_ids is not None:
            for ids in self.bad_words_token_ids:
                if not _token_ids("bad_words_token_ids", ids):
                    raise ValueError("bad_words_token_ids must not hold an empty list.")

    def _check_structured_outputs(self) -> None:
        given = self.structured_outputs
        if isinstance(given, dict):
            try:
                given = self.structured_outputs = StructuredOutputsParams(**given)
            except TypeError as error:
                raise ValueError(f"structured_outputs: {error}.") from None
        if given is not None and not isinstance(given, StructuredOutputsParams):
            raise ValueError(
                f"structured_outputs must be StructuredOutputsParams or a dict, got {given!r}."
            )

    @property
    def greedy(self) -> bool:
        return self.temperature < _GREEDY_BELOW

    @property
    def logits_processors(self) -> dict[str, dict[str, float]]:
        """By name, the custom processors that `extra_args` ask for, with their parameters."""
        return (self.extra_args or {}).get(EXTRA_ARG) or {}

    @property
    def stop_strings(self) -> list[str]:
        if self.stop is None:
            return []
        return [self.stop] if isinstance(self.stop, str) else self.stop


def check_integer(name: str, value: Any, low: int, high: int) -> int:
    """The value as an int. Raises `ValueError` with the name and the limits."""
    if type(value) is not int:
        if not isinstance(value, Integral) or isinstance(value, bool):
            raise ValueError(f"{name} must be an integer, got {value!r}.")
        value = int(value)
    if value < low:
        raise ValueError(f"{name} must be at least {low}, got {value}.")
    if value > high:
        raise ValueError(f"{name} must be at most {high}, got {value}.")
    return value


def check_real(name: str, value: Any, low: float, high: float = math.inf) -> float:
    """The value as a float. Raises `ValueError` with the name and the limits."""
    if type(value) is not float:
        if not isinstance(value, Real) or isinstance(value, bool):
            raise ValueError(f"{name} must be a number, got {value!r}.")
        try:
            value = float(value)
        except OverflowError:
            value = math.inf
    if not math.isfinite(value):
        raise ValueError(f"{name} must be a finite number, got {value}.")
    if not low <= value <= high:
        limit = f"in [{low:g}, {high:g}]" if math.isfinite(high) else f"at least {low:g}"
        raise ValueError(f"{name} must be {limit}, got {value}.")
    return value


def _items(name: str, values: Any, of: str) -> list[Any]:
    if isinstance(values, str | bytes | dict) or not isinstance(values, Iterable):
        raise ValueError(f"{name} must be a list of {of}, got {values!r}.")
    return list(values)


def _strings(name: str, values: Any) -> list[str]:
    items = _items(name, values, "strings")
    for item in items:
        if not isinstance(item, str) or not item:
            raise ValueError(f"{name} must hold non-empty strings, got {item!r}.")
    return items


def _token_ids(name: str, values: Any) -> list[int]:
    return [
        check_integer(f"{name}[{i}]", value, 0, _INT32_MAX)
        for i, value in enumerate(_items(name, values, "token ids"))
    ]


def _logit_bias(biases: Any) -> dict[int, float]:
    """Keys may be decimal strings, as in JSON. Biases are clamped, so an infinite one is a very strong one."""
    if not isinstance(biases, dict):
        raise ValueError(f"logit_bias must map token ids to numbers, got {biases!r}.")
    checked: dict[int, float] = {}
    for key, bias in biases.items():
        token_id = int(key) if isinstance(key, str) and key.isdecimal() else key
        token_id = check_integer("logit_bias key", token_id, 0, _INT32_MAX)
        if isinstance(bias, bool) or not isinstance(bias, Real) or math.isnan(bias):
            raise ValueError(f"logit_bias[{token_id}] must be a number, got {bias!r}.")
        checked[token_id] = float(min(100.0, max(-100.0, bias)))
    return checked
