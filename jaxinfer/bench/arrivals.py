"""When requests arrive."""

from __future__ import annotations

import math

import numpy as np


def arrival_times(
    count: int, request_rate: float, burstiness: float, rng: np.random.Generator
) -> list[float]:
    """Seconds after the start, ascending.

    The intervals are Gamma distributed with mean 1 / `request_rate` and shape `burstiness`: 1 is a Poisson process,
    below 1 requests come in bursts, above 1 more evenly; their coefficient of variation is 1 / sqrt(burstiness). An
    infinite rate sends all of them at once.
    """
    if math.isinf(request_rate):
        return [0.0] * count
    intervals = rng.gamma(shape=burstiness, scale=1 / (request_rate * burstiness), size=count)
    return np.cumsum(intervals).tolist()
