"""`/metrics`: the engine's numbers in Prometheus' text format, and the process's own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol

from prometheus_client import CONTENT_TYPE_LATEST as CONTENT_TYPE
from prometheus_client import (
    CollectorRegistry,
    GCCollector,
    PlatformCollector,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
)
from prometheus_client.core import Metric as Family
from prometheus_client.registry import Collector

from jaxinfer import metrics
from jaxinfer.engine.errors import EngineDeadError
from jaxinfer.frontend.metrics import PREFIX, EngineMetrics

__all__ = ["CONTENT_TYPE", "Metrics"]


class Source(Protocol):
    """`cores`: one for each engine core, with the labels of its metrics."""

    @property
    def cores(self) -> Sequence[EngineMetrics]: ...

    def snapshot(self) -> list[metrics.Metric]: ...


class Metrics(Collector):
    """`check_health` raises `EngineDeadError` when the engine core of this number has died. The process's own numbers
    are left out where it is not `alone`: those of one of several would mean nothing."""

    def __init__(
        self, engine: Source, check_health: Callable[[int], None], *, alone: bool = True
    ) -> None:
        self._engine = engine
        self._check_health = check_health
        self._registry = CollectorRegistry()
        self._registry.register(self)
        if alone:
            ProcessCollector(registry=self._registry)
            PlatformCollector(registry=self._registry)
            GCCollector(registry=self._registry)

    def render(self) -> bytes:
        """In Prometheus' text format."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Family]:
        families: dict[str, Family] = {}
        for metric in [*self._are_up(), *self._engine.snapshot()]:
            family = families.get(metric.name)
            if family is None:
                family = families[metric.name] = _family(metric)
            _add(family, metric)
        yield from families.values()

    def _are_up(self) -> Iterator[metrics.Gauge]:
        for number, core in enumerate(self._engine.cores):
            try:
                self._check_health(number)
                is_up = 1
            except EngineDeadError:
                is_up = 0
            text = "1, or 0 when the engine core has died"
            yield metrics.Gauge(f"{PREFIX}engine_up", core.labels, is_up, text=text)

    def describe(self) -> Iterable[Family]:
        """Nothing is checked for duplicates at registration."""
        return []


def _family(metric: metrics.Metric) -> Family:
    names = list(metric.labels)
    match metric:
        case metrics.Counter():
            return CounterMetricFamily(metric.name, metric.text, labels=names)
        case metrics.Vector():
            return CounterMetricFamily(metric.name, metric.text, labels=[*names, "position"])
        case metrics.Histogram():
            return HistogramMetricFamily(metric.name, metric.text, labels=names)
        case _:
            return GaugeMetricFamily(metric.name, metric.text, labels=names)


def _add(family: Family, metric: metrics.Metric) -> None:
    values = list(metric.labels.values())
    match metric:
        case metrics.Counter() | metrics.Gauge():
            family.add_metric(values, metric.value)
        case metrics.Vector():
            for position, value in enumerate(metric.values):
                family.add_metric([*values, str(position)], value)
        case metrics.Histogram():
            family.add_metric(values, list(metric.buckets.items()), metric.sum)
