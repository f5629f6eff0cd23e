"""Fields that completions and chat completions share, and the refusal of what isn't there."""

from __future__ import annotations

import logging
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from jaxinfer.sampling_params import SamplingParams
from jaxinfer.server.errors import BadRequest
from jaxinfer.server.protocol.structured import StructuredFields

logger = logging.getLogger(__name__)

MAX_N = 128
"""Completions of one prompt; each costs memory before anything has been computed."""

_warned: set[str] = set()


def _no_bool(value: Any) -> Any:
    if isinstance(value, bool):
        raise ValueError("must be a number, not a boolean")
    return value


def is_neutral(value: Any) -> bool:
    """Whether it asks for nothing, whatever the field is."""
    return value is None or value is False or value in ("", [], {})


Int = Annotated[int, BeforeValidator(_no_bool)]
Float = Annotated[float, BeforeValidator(_no_bool)]


class NullsAreAbsent(BaseModel):
    """Fields that are null have their defaults: clients send all that they know of, and OpenAI's API takes it so."""

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        return {name: value for name, value in data.items() if value is not None}


class StreamOptions(NullsAreAbsent):
    include_usage: bool = False
    continuous_usage_stats: bool = False


class GenerationRequest(StructuredFields, NullsAreAbsent):
    """What both endpoints take. Values are checked by `SamplingParams`; here only their types are.

    Unknown fields are ignored, with one warning for each name, as vLLM does.
    """

    model_config = ConfigDict(extra="allow", protected_namespaces=())

    unsupported: ClassVar[dict[str, str]] = {
        "best_of": "best_of is not supported; use n.",
        "prompt_embeds": "Prompts as embeddings are not supported.",
        "watermarking": "Watermarks are not supported.",
        "thinking_token_budget": "thinking_token_budget is not supported yet.",
        "repetition_detection": "repetition_detection is not supported.",
        "kv_transfer_params": "KV transfer is not supported.",
        "ec_transfer_params": "Encoder cache transfer is not supported.",
        "routed_experts_prompt_start": "Routed experts are not reported.",
        "return_token_offsets": "return_token_offsets is not supported yet.",
    }
    """Refused unless null, false or empty, or, for `best_of`, what `n` says anyway."""

    without_effect: ClassVar[frozenset[str]] = frozenset(
        {
            "metadata",
            "prompt_cache_key",
            "prompt_cache_options",
            "prompt_cache_retention",
            "safety_identifier",
            "service_tier",
            "session_id",
            "store",
            "stream_interval",
            "user",
        }
    )
    """Known, and nothing that this server would do differently."""

    model: str | None = None
    frequency_penalty: Float | None = None
    logit_bias: dict[str, Float] | None = None
    n: Int | None = None
    presence_penalty: Float | None = None
    seed: Int | None = None
    stop: str | list[str] | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    temperature: Float | None = None
    top_p: Float | None = None

    top_k: Int | None = None
    min_p: Float | None = None
    repetition_penalty: Float | None = None
    stop_token_ids: list[Int] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    min_tokens: Int = 0
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    allowed_token_ids: list[Int] | None = None
    bad_words: list[str] | None = None
    prompt_logprobs: Int | None = None
    logprob_token_ids: list[Int] | None = None
    truncate_prompt_tokens: Int | None = Field(default=None, ge=-1)
    truncation_side: Literal["left", "right"] | None = None
    use_beam_search: bool = False
    length_penalty: Float = 1.0
    priority: Int = 0
    timeout: Float | None = None
    request_id: str | None = None
    cache_salt: str | None = Field(default=None, min_length=1)
    vllm_xargs: dict[str, Any] | None = None
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False

    @model_validator(mode="before")
    @classmethod
    def _refuse_unsupported(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        for name, reason in cls.unsupported.items():
            value = data.get(name)
            if name == "best_of" and value in (1, data.get("n")):
                continue
            if not is_neutral(value):
                raise BadRequest(reason, param=name)
        return data

    @model_validator(mode="after")
    def _check_stream(self) -> GenerationRequest:
        if self.stream_options is not None and not self.stream:
            raise BadRequest("stream_options needs stream to be true.", param="stream_options")
        if self.length_penalty != 1 and not self.use_beam_search:
            raise BadRequest("length_penalty needs use_beam_search.", param="length_penalty")
        if self.n is not None and self.n > MAX_N:
            raise BadRequest(f"n must be at most {MAX_N}, got {self.n}.", param="n")
        if self.stream and self.prompt_logprobs is not None:
            raise BadRequest("prompt_logprobs can't be streamed.", param="prompt_logprobs")
        for name in (self.model_extra or {}).keys() - self.without_effect - self.unsupported.keys():
            if name not in _warned and len(_warned) < 100:
                _warned.add(name)
                logger.warning("The field %.100r of a request is unknown, and ignored.", name)
        return self

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def continuous_usage(self) -> bool:
        return self.include_usage and self.stream_options.continuous_usage_stats  # type: ignore[union-attr]

    def sampling_params(self, defaults: dict[str, Any], **more: Any) -> SamplingParams:
        """The model's own defaults (by name), then what the client asks for. Raises `ValueError`."""
        names = (
            "n",
            "presence_penalty",
            "frequency_penalty",
            "repetition_penalty",
            "temperature",
            "top_p",
            "top_k",
            "min_p",
            "seed",
            "stop",
            "stop_token_ids",
            "ignore_eos",
            "min_tokens",
            "prompt_logprobs",
            "logprob_token_ids",
            "skip_special_tokens",
            "spaces_between_special_tokens",
            "include_stop_str_in_output",
            "allowed_token_ids",
            "bad_words",
        )
        given = {name: value for name in names if (value := getattr(self, name)) is not None}
        if given.get("stop") in ("", []):
            del given["stop"]
        if self.logit_bias:
            given["logit_bias"] = _logit_bias(self.logit_bias)
        if self.vllm_xargs:
            given["extra_args"] = self.vllm_xargs
        if (structured := self.structured()) is not None:
            given["structured_outputs"] = structured
        return SamplingParams(**{**defaults, **given, **more})


def _logit_bias(bias: dict[str, float]) -> dict[int, float]:
    try:
        return {int(token_id): value for token_id, value in bias.items()}
    except ValueError:
        raise BadRequest("logit_bias must map token ids to numbers.", param="logit_bias") from None
