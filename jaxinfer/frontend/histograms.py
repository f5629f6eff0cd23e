"""Histograms of what happens to requests, and where their buckets end: vLLM's bounds."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate

from jaxinfer import metrics

PREFIX = "jaxinfer:"


def steps(limit: float) -> tuple[float, ...]:
    """1, 2, 5, 10 … up to `limit`."""
    values = [m * 10.0**e for e in range(12) for m in (1, 2, 5)]
    return tuple(v for v in values if v <= limit) or (1.0,)


TTFT = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5)
TTFT += (10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0)
ITL = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)
ITL = (0.001, 0.0025, 0.005, *ITL, 20.0, 40.0, 80.0)
LATENCY = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0)
LATENCY += (120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0)
TOKENS_PER_STEP = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


class Histogram:
    """Counts per bucket. Many equal values are one observation."""

    def __init__(self, name: str, text: str, bounds: Sequence[float]) -> None:
        self._name, self._text = name, text
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float, count: int = 1) -> None:
        self._counts[bisect_left(self._bounds, value)] += count
        self._sum += value * count

    def snapshot(self, labels: dict[str, str]) -> metrics.Histogram:
        totals = list(accumulate(self._counts))
        bounds = [*map(str, map(float, self._bounds)), "+Inf"]
        buckets = dict(zip(bounds, totals, strict=True))
        return metrics.Histogram(
            PREFIX + self._name, labels, totals[-1], self._sum, buckets, text=self._text
        )
