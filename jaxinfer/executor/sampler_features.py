"""What a sampling program can do: the static part of its compilation key, kept to a handful of combinations."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from jaxinfer.config import MAX_LOGIT_BIAS

BIAS_WIDTHS = (16, MAX_LOGIT_BIAS)
"""How many logit_bias entries a row of the device state may hold; the wide one once a request has needed it."""

_COMMON_LOGPROBS = 20


class SamplerLevel(enum.IntEnum):
    """`GREEDY` is an argmax; `RANDOM` adds temperature, top-k, top-p, min-p and seeds; `FULL` adds penalties and
    logit_bias, which need device state."""

    GREEDY = 0
    RANDOM = 1
    FULL = 2


@dataclass(frozen=True, slots=True)
class SamplerFeatures:
    """One variant of the sampling program.

    `masked`: it takes token masks (always so for FULL, which is given all-ones words where nothing is masked).
    `num_logprobs`: top logprobs returned beside the chosen token's, None for no logprobs at all.
    `bias_width`: logit_bias entries per row in the state (FULL only, else 0).
    """

    level: SamplerLevel = SamplerLevel.GREEDY
    masked: bool = False
    num_logprobs: int | None = None
    bias_width: int = 0


def logprobs_rungs(max_logprobs: int, vocab_size: int) -> tuple[int, ...]:
    """The values `SamplerFeatures.num_logprobs` can take besides None, ascending; a request gets the first that holds
    what it asked for and the host cuts the rest away."""
    most = min(max_logprobs, vocab_size) if max_logprobs >= 0 else vocab_size
    return (most,) if most <= _COMMON_LOGPROBS else (_COMMON_LOGPROBS, most)


def all_features(max_logprobs: int, vocab_size: int) -> list[SamplerFeatures]:
    """Every variant that `SamplingRows.features` can ask for, the most used first: 12 at the default limits (2
    greedy, 2 random, 2 full, each with and without logprobs)."""
    variants = [
        (SamplerLevel.GREEDY, False, 0),
        (SamplerLevel.RANDOM, False, 0),
        (SamplerLevel.GREEDY, True, 0),
        (SamplerLevel.RANDOM, True, 0),
        *((SamplerLevel.FULL, True, width) for width in BIAS_WIDTHS),
    ]
    return [
        SamplerFeatures(level, masked, num_logprobs, width)
        for num_logprobs in (None, *logprobs_rungs(max_logprobs, vocab_size))
        for level, masked, width in variants
    ]
