"""How tokens are drafted before the model sees them: the keys of `speculative_config`, with vLLM's names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

SpeculativeMethod = Literal["ngram", "draft_model", "eagle3", "medusa"]
DraftSampleMethod = Literal["greedy", "probabilistic"]

DISABLE_BY_BATCH_SIZE = {"cpu": 16, "gpu": 64}
"""A step of more rows keeps the device's arithmetic busy by itself, so that drafts would no longer be verified for
free: a GPU is balanced at some 200 tokens, a CPU's matrices gain little from 64 on."""

_LOOKUP = 5


@dataclass(frozen=True, slots=True)
class SpeculativeConfig:
    """`num_speculative_tokens` are drafted at most per request and step. Steps in which more than
    `disable_by_batch_size` requests decode draft nothing.

    "ngram": the last `prompt_lookup_max` tokens, or else fewer, down to `prompt_lookup_min`, are looked for earlier in
    the sequence; what followed them there is drafted. The other methods draft with what the checkpoint `model` holds:
    a smaller model of the same vocabulary, an EAGLE-3 layer or Medusa heads. With `draft_sample_method`
    "probabilistic", requests that sample at random have their drafts drawn too.
    """

    method: SpeculativeMethod
    num_speculative_tokens: int
    disable_by_batch_size: int
    prompt_lookup_max: int = _LOOKUP
    prompt_lookup_min: int = _LOOKUP
    model: str | None = None
    draft_sample_method: DraftSampleMethod = "greedy"

    @property
    def from_model(self) -> bool:
        """Whether the executor drafts; else the host does."""
        return self.method != "ngram"

    @property
    def num_lookahead_tokens(self) -> int:
        """Positions after a sampling row's last computed one that the drafter writes keys and values of."""
        K = self.num_speculative_tokens
        return {"draft_model": K, "eagle3": K - 1}.get(self.method, 0)


def speculative_config(given: Mapping[str, Any], device: str) -> SpeculativeConfig:
    """Fill in the defaults. Raises `ValueError` that names the key which is unknown, missing or out of range."""
    known = [field.name for field in fields(SpeculativeConfig)]
    if unknown := sorted(set(given) - set(known)):
        raise ValueError(f"speculative_config has unknown keys {unknown}; it may hold {known}.")
    method = given.get("method")
    if method not in get_args(SpeculativeMethod):
        raise ValueError(
            f"speculative_config's method must be one of {get_args(SpeculativeMethod)}, got {method!r}."
        )
    for name in known:
        value = given.get(name)
        if name in _INTEGERS and value is not None:
            _check_integer(name, value, 0 if name == "disable_by_batch_size" else 1)
    _check_model(given)
    number = given.get("num_speculative_tokens")
    if number is None:
        raise ValueError("speculative_config needs num_speculative_tokens.")
    longest, shortest = given.get("prompt_lookup_max"), given.get("prompt_lookup_min")
    if longest is None:
        longest = _LOOKUP if shortest is None else shortest
    if shortest is None:
        shortest = longest
    if shortest > longest:
        raise ValueError(
            f"speculative_config's prompt_lookup_min ({shortest}) must be at most prompt_lookup_max ({longest})."
        )
    limit = given.get("disable_by_batch_size")
    if limit is None:
        limit = DISABLE_BY_BATCH_SIZE[device]
    return SpeculativeConfig(
        method,
        number,
        limit,
        longest,
        shortest,
        given.get("model"),
        given.get("draft_sample_method") or "greedy",
    )


_INTEGERS = (
    "num_speculative_tokens",
    "disable_by_batch_size",
    "prompt_lookup_max",
    "prompt_lookup_min",
)


def _check_model(given: Mapping[str, Any]) -> None:
    """What goes with a model that drafts, and only with one."""
    method, sampling = given["method"], given.get("draft_sample_method")
    if sampling is not None and sampling not in get_args(DraftSampleMethod):
        raise ValueError(
            f"speculative_config's draft_sample_method must be one of {get_args(DraftSampleMethod)}, got {sampling!r}."
        )
    if method != "ngram":
        if not isinstance(given.get("model"), str):
            raise ValueError(
                f"speculative_config needs a model for method {method!r}, got {given.get('model')!r}."
            )
        return
    for name in ("model", "draft_sample_method"):
        if given.get(name) is not None:
            raise ValueError(f"speculative_config's {name} has no meaning for method 'ngram'.")


def _check_integer(name: str, value: object, low: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < low:
        raise ValueError(
            f"speculative_config's {name} must be an integer of at least {low}, got {value!r}."
        )
