"""The numbers of several API server processes as one: counts are added up, gauges are the cores'."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from threading import Lock

from jaxinfer import metrics
from jaxinfer.config import EngineConfig
from jaxinfer.engine.messages import EngineCoreOutputs
from jaxinfer.frontend.core_metrics import CoreMetrics
from jaxinfer.frontend.metrics import EngineMetrics
from jaxinfer.server.control import Report


def report(number: int, num_active: int, snapshot: Iterable[metrics.Metric]) -> Report:
    """Gauges stay behind: an API server doesn't hear of the cores' steps."""
    made = Report(number, num_active, [], [], [])
    for metric in snapshot:
        match metric:
            case metrics.Counter():
                made.counters.append(metric)
            case metrics.Vector():
                made.vectors.append(metric)
            case metrics.Histogram():
                made.histograms.append(metric)
    return made


class SharedMetrics:
    """What the cores report to the supervisor, and what API server processes have reported last; of one that has ended,
    too, so that no counter ever falls. `num_open` says whether a core has anything to do."""

    def __init__(
        self,
        config: EngineConfig,
        num_blocks: Sequence[int | None],
        model_name: str,
        num_open: Callable[[int], int],
    ) -> None:
        self._steps = CoreMetrics(config, num_blocks, num_open)
        self._steps.model_name = model_name
        self._lock = Lock()
        self.reports: dict[int, Report] = {}
        """By client."""

    @property
    def cores(self) -> Sequence[EngineMetrics]:
        return self._steps.cores

    def step(self, core: int, outputs: EngineCoreOutputs) -> None:
        """In the core's thread."""
        outputs.core = core
        with self._lock:
            self._steps.step(outputs)

    def slept(self, level: int) -> None:
        with self._lock:
            self._steps.slept(level)

    def snapshot(self) -> list[metrics.Metric]:
        with self._lock:
            total = self._steps.snapshot()
        parts: dict[object, list[metrics.Metric]] = {}
        for one in self.reports.values():
            for metric in (*one.counters, *one.vectors, *one.histograms):
                parts.setdefault(_key(metric), []).append(metric)
        return [_sum(metric, parts.get(_key(metric), ())) for metric in total]


def _key(metric: metrics.Metric) -> object:
    return metric.name, tuple(sorted(metric.labels.items()))


def _sum(first: metrics.Metric, others: Sequence[metrics.Metric]) -> metrics.Metric:
    name, labels, text = first.name, first.labels, first.text
    all_of = (first, *others)
    match first:
        case metrics.Counter():
            value = sum(m.value for m in all_of if isinstance(m, metrics.Counter))
            return metrics.Counter(name, labels, value, text=text)
        case metrics.Vector():
            vectors = [m.values for m in all_of if isinstance(m, metrics.Vector)]
            return metrics.Vector(
                name, labels, list(map(sum, zip(*vectors, strict=True))), text=text
            )
        case metrics.Histogram():
            parts = [m for m in all_of if isinstance(m, metrics.Histogram)]
            buckets = {bound: sum(m.buckets[bound] for m in parts) for bound in first.buckets}
            count, total = sum(m.count for m in parts), sum(m.sum for m in parts)
            return metrics.Histogram(name, labels, count, total, buckets, text=text)
        case _:
            return first
