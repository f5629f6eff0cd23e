"""How the tokens of one request are chosen: vLLM's names, meanings and defaults."""

from __future__ import annotations

import enum
import math
from typing import Any

import msgspec

_EPS = 1e-5
"""Temperatures below this are greedy (the smallest at which float32 logits divided by it stay finite)."""
_MAX_TEMP = 1e-2
MAX_STOP_STRINGS = 64
MAX_N = 16384


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
        temperature: 0 is greedy.
        top_p: Keep the smallest set of tokens whose probabilities sum to at least this, in (0, 1].
        top_k: Keep the k most likely tokens; 0 or -1 keeps all.
        min_p: Keep tokens at least this fraction as likely as the likeliest one, in [0, 1].
        seed: The same seed gives the same tokens, whoever shares the batch.
        stop: Strings that end the output; not part of the text unless `include_stop_str_in_output`.
        stop_token_ids: Token ids that end the output and stay part of it.
        ignore_eos: Generate on after the model's end-of-sequence token.
        max_tokens: Upper bound of the output; None is as many as the context holds.
        min_tokens: No stop token may be sampled, and no stop string ends the output, before this many tokens.
        logprobs: Report this many top logprobs per output token and the sampled one's; -1 is the whole vocabulary.
        prompt_logprobs: The same for the prompt's tokens.
        detokenize: Whether to produce text.
        skip_special_tokens: Leave special tokens out of the text.
        spaces_between_special_tokens: Put spaces between special tokens in the text.
        logit_bias: Added to the logits of these token ids, clamped to [-100, 100].
        allowed_token_ids: Only these may be sampled.
        bad_words: Words whose token sequences are never completed.
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

    @property
    def greedy(self) -> bool:
        return self.temperature < _EPS

    @property
    def stop_strings(self) -> list[str]:
        if self.stop is None:
            return []
        return [self.stop] if isinstance(self.stop, str) else self.stop
