"""What a sampling program can do: the static part of its compilation key, kept to a handful of combinations."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from jaxinfer.config import MAX_LOGPROB_TOKEN_IDS

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
    `num_logprobs`: top logprobs returned beside the chosen token's, None for no logprobs at all (always so below FULL:
    every combination is a program to compile for each number of rows).
    `processors`: it applies the engine's custom logits processors (a FULL one, as they may read its state).
    """

    level: SamplerLevel = SamplerLevel.GREEDY
    masked: bool = False
    num_logprobs: int | None = None
    processors: bool = False

    @property
    def stateful(self) -> bool:
        """Whether the program takes and returns `SamplerArrays`."""
        return self.level is SamplerLevel.FULL


def logprobs_rungs(max_logprobs: int, vocab_size: int) -> tuple[int, ...]:
    """The values `SamplerFeatures.num_logprobs` can take besides None, ascending; a request gets the first that holds
    what it asked for and the host cuts the rest away."""
    most = min(max_logprobs, vocab_size) if max_logprobs >= 0 else vocab_size
    return (most,) if most <= _COMMON_LOGPROBS else (_COMMON_LOGPROBS, most)


def logprob_ids_width(num_logprobs: int) -> int:
    """How many tokens a program that returns `num_logprobs` lets a row name instead of its likeliest ones."""
    return min(num_logprobs, MAX_LOGPROB_TOKEN_IDS)


def all_features(
    max_logprobs: int, vocab_size: int, *, processors: bool = False
) -> list[SamplerFeatures]:
    """Every variant that `SamplingRows.features` can ask for, the most used first: 6 at the default limits, and half
    as many more in an engine that has custom `processors`."""
    return [
        SamplerFeatures(SamplerLevel.GREEDY),
        SamplerFeatures(SamplerLevel.RANDOM),
        SamplerFeatures(SamplerLevel.GREEDY, masked=True),
        SamplerFeatures(SamplerLevel.RANDOM, masked=True),
        *(
            SamplerFeatures(SamplerLevel.FULL, True, num_logprobs, processed)
            for processed in ((False, True) if processors else (False,))
            for num_logprobs in (None, *logprobs_rungs(max_logprobs, vocab_size))
        ),
    ]
