"""Slopes of ALiBi (Press et al. 2021, arXiv 2108.12409)."""

from __future__ import annotations

import math


def alibi_slopes(num_heads: int, max_bias: float = 8.0) -> tuple[float, ...]:
    """Per head, what a score loses for each token of distance.

    A geometric sequence for a power of two of heads; else every second slope of the next power of two, and then of the
    others as many as there are heads.
    """
    power = 2 ** math.ceil(math.log2(num_heads))
    slopes = [2.0 ** (-(i + 1) * max_bias / power) for i in range(power)]
    if power != num_heads:
        slopes = (slopes[1::2] + slopes[::2])[:num_heads]
    return tuple(slopes)
