"""What `get_metrics` returns: the same numbers that `/metrics` shows, as plain objects with vLLM's names and fields."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Metric:
    """`labels` tell metrics of the same `name` apart; `text` says what is measured."""

    name: str
    labels: dict[str, str]
    text: str = field(compare=False, kw_only=True)


@dataclass(frozen=True, slots=True)
class Counter(Metric):
    """Only grows. Prometheus reads it as `name` with `_total` behind it."""

    value: float


@dataclass(frozen=True, slots=True)
class Gauge(Metric):
    """As it stands now."""

    value: float


@dataclass(frozen=True, slots=True)
class Vector(Metric):
    """A counter per position."""

    values: list[int]


@dataclass(frozen=True, slots=True)
class Histogram(Metric):
    """`buckets`: by upper bound as Prometheus writes it, how many of the `count` values are at most that; "+Inf" last.
    `sum` of all values."""

    count: int
    sum: float
    buckets: dict[str, int]
