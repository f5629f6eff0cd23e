"""`/metrics`: vLLM's names under `jaxinfer:`, from what the engine core and the streams report."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate

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
    Metric,
)
from prometheus_client.registry import Collector

from jaxinfer.config import EngineConfig
from jaxinfer.engine.messages import EngineCoreOutputs, FinishReason
from jaxinfer.engine.stats import SchedulerStats
from jaxinfer.frontend.processor import PreparedRequest
from jaxinfer.outputs import RequestMetrics, RequestOutput
from jaxinfer.sampling_params import RequestOutputKind

__all__ = ["CONTENT_TYPE", "Metrics"]

PREFIX = "jaxinfer:"
_REASONS = tuple(str(reason) for reason in FinishReason)


def _steps(limit: float) -> tuple[float, ...]:
    """1, 2, 5, 10 … up to `limit`."""
    values = [m * 10.0**e for e in range(12) for m in (1, 2, 5)]
    return tuple(v for v in values if v <= limit) or (1.0,)


_TTFT = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5)
_TTFT += (10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0)
_ITL = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)
_ITL = (0.001, 0.0025, 0.005, *_ITL, 20.0, 40.0, 80.0)
_LATENCY = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0)
_LATENCY += (120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0)
_TOKENS_PER_STEP = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


class Histogram:
    """Counts per bucket. Many equal values are one observation, which prometheus_client's own doesn't offer."""

    def __init__(self, name: str, text: str, bounds: Sequence[float]) -> None:
        self.name, self.text = name, text
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float, count: int = 1) -> None:
        self._counts[bisect_left(self._bounds, value)] += count
        self._sum += value * count

    def family(self, names: Sequence[str], values: Sequence[str]) -> Metric:
        family = HistogramMetricFamily(PREFIX + self.name, self.text, labels=names)
        totals = accumulate(self._counts)
        bounds = [*map(str, map(float, self._bounds)), "+Inf"]
        family.add_metric(values, list(zip(bounds, totals, strict=True)), self._sum)
        return family


class Metrics(Collector):
    """An `AsyncLLM`'s observer. `num_unfinished` says whether the engine has anything to do: with nothing, it takes no
    step that would report that nothing runs."""

    def __init__(
        self, model: str, config: EngineConfig, num_blocks: int, num_unfinished: Callable[[], int]
    ) -> None:
        self._labels = {"model_name": model, "engine": "0"}
        self._config = config
        self._num_blocks = num_blocks
        self._num_unfinished = num_unfinished
        self._stats = SchedulerStats()
        self._counts: Counter[str] = Counter()
        self._ends: Counter[str] = Counter()
        self._last_token: dict[str, float] = {}
        """Per completion: when its last token came, or minus its arrival while there is none."""
        longest = _steps(config.model.max_model_len)
        made: list[Histogram] = []

        def histogram(name: str, text: str, bounds: Sequence[float]) -> Histogram:
            made.append(Histogram(name, text, bounds))
            return made[-1]

        self._iteration = histogram("iteration_tokens_total", "Tokens per step", _TOKENS_PER_STEP)
        self._prompt = histogram("request_prompt_tokens", "Prompt tokens per request", longest)
        self._generation = histogram("request_generation_tokens", "Tokens generated", longest)
        self._n = histogram("request_params_n", "The parameter n", (1, 2, 5, 10, 20))
        self._limit = histogram("request_params_max_tokens", "The parameter max_tokens", longest)
        self._ttft = histogram("time_to_first_token_seconds", "Time to first token", _TTFT)
        self._itl = histogram("inter_token_latency_seconds", "Between two tokens", _ITL)
        self._per_token = histogram(
            "request_time_per_output_token_seconds", "Mean time between a request's tokens", _ITL
        )
        self._e2e = histogram("e2e_request_latency_seconds", "Arrival to end", _LATENCY)
        self._queue = histogram("request_queue_time_seconds", "Waiting to be run", _LATENCY)
        self._prefill = histogram("request_prefill_time_seconds", "Run to first token", _LATENCY)
        self._decode = histogram("request_decode_time_seconds", "First token to last", _LATENCY)
        self._inference = histogram("request_inference_time_seconds", "Run to last token", _LATENCY)
        self._histograms = made
        self._registry = CollectorRegistry()
        self._registry.register(self)
        ProcessCollector(registry=self._registry)
        PlatformCollector(registry=self._registry)
        GCCollector(registry=self._registry)

    def render(self) -> bytes:
        """In Prometheus' text format."""
        return generate_latest(self._registry)

    # ---- what the engine reports -------------------------------------------------------------------------------------

    def request_added(self, request: PreparedRequest) -> None:
        for core_request in request.core_requests:
            self._last_token[core_request.request_id] = -request.arrival_time
        self._n.observe(request.sampling_params.n)
        if request.sampling_params.max_tokens is not None:
            self._limit.observe(request.sampling_params.max_tokens)

    def step(self, outputs: EngineCoreOutputs) -> None:
        stats = outputs.stats
        if stats is not None:
            self._stats = stats
            for name in ("num_preemptions", "prefix_cache_queries", "prefix_cache_hits"):
                self._counts[name] += getattr(stats, name)
            self._iteration.observe(stats.num_scheduled_tokens)
        self._counts["generation_tokens"] += len(outputs.token_ids)
        self._time_tokens(outputs.request_ids, outputs.timestamp)

    def _time_tokens(self, request_ids: Sequence[str], now: float) -> None:
        """Most tokens of a step come equally long after the ones before them."""
        last_token = self._last_token
        intervals: dict[float, int] = {}
        for request_id in request_ids:
            before = last_token.get(request_id)
            if before is None:  # aborted, and the core didn't know yet
                continue
            if before < 0:
                self._ttft.observe(now + before)
            else:
                interval = now - before
                intervals[interval] = intervals.get(interval, 0) + 1
            last_token[request_id] = now
        for interval, count in intervals.items():
            self._itl.observe(interval, count)

    def request_output(self, request: PreparedRequest, output: RequestOutput) -> None:
        is_cumulative = request.sampling_params.output_kind is RequestOutputKind.CUMULATIVE
        if output.finished or not is_cumulative:
            self._ends.update(c.finish_reason for c in output.outputs if c.finish_reason)
        if not output.finished:
            return
        for core_request in request.core_requests:
            self._last_token.pop(core_request.request_id, None)
        self._prompt.observe(len(request.prompt_token_ids))
        self._counts["prompt_tokens"] += len(request.prompt_token_ids)
        if output.metrics is not None:
            self._observe_times(output.metrics, request.sampling_params.n)

    def _observe_times(self, metrics: RequestMetrics, n: int) -> None:
        self._generation.observe(metrics.num_generation_tokens)
        if (latency := metrics.e2e_latency) is not None:
            self._e2e.observe(latency)
        if (waited := metrics.time_in_queue) is not None:
            self._queue.observe(waited)
        scheduled, first, last = (
            metrics.first_scheduled_time,
            metrics.first_token_time,
            metrics.last_token_time,
        )
        if scheduled is None or first is None or last is None:
            return
        self._prefill.observe(first - scheduled)
        self._decode.observe(last - first)
        self._inference.observe(last - scheduled)
        if (later_tokens := metrics.num_generation_tokens / n - 1) > 0:
            self._per_token.observe((last - first) / later_tokens)

    # ---- what Prometheus reads ---------------------------------------------------------------------------------------

    def collect(self) -> Iterator[Metric]:
        stats = self._stats if self._num_unfinished() else SchedulerStats()
        yield self._gauge("num_requests_running", "Requests that run", stats.num_running)
        yield self._gauge("num_requests_waiting", "Requests that wait", stats.num_waiting)
        yield self._gauge("kv_cache_usage_perc", "Used share of the KV cache", stats.kv_cache_usage)
        yield self._gauge(
            "num_compilations",
            "Programs compiled after start-up; not 0 means that requests had to wait for them",
            self._stats.num_compilations,
        )
        yield self._counter("num_preemptions", "Requests put back to be recomputed")
        yield self._counter("prefix_cache_queries", "Prompt tokens looked for in the prefix cache")
        yield self._counter("prefix_cache_hits", "Prompt tokens found there")
        yield self._counter("prompt_tokens", "Prompt tokens of finished requests")
        yield self._counter("generation_tokens", "Tokens generated")
        success = CounterMetricFamily(
            f"{PREFIX}request_success",
            "Completions that ended, by reason",
            labels=[*self._labels, "finished_reason"],
        )
        for reason in _REASONS:
            success.add_metric([*self._labels.values(), reason], self._ends[reason])
        yield success
        for histogram in self._histograms:
            yield histogram.family(list(self._labels), list(self._labels.values()))
        yield self._cache_config()

    def describe(self) -> Iterable[Metric]:
        """Nothing is checked for duplicates at registration."""
        return []

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(PREFIX + name, text, labels=list(self._labels))
        family.add_metric(list(self._labels.values()), value)
        return family

    def _counter(self, name: str, text: str) -> Metric:
        family = CounterMetricFamily(PREFIX + name, text, labels=list(self._labels))
        family.add_metric(list(self._labels.values()), self._counts[name])
        return family

    def _cache_config(self) -> Metric:
        values = {
            **self._labels,
            "block_size": str(self._config.cache.block_size),
            "cache_dtype": self._config.cache.dtype or self._config.model.dtype,
            "num_gpu_blocks": str(self._num_blocks),
            "gpu_memory_utilization": str(self._config.cache.gpu_memory_utilization),
        }
        family = GaugeMetricFamily(
            f"{PREFIX}cache_config_info", "The KV cache", labels=list(values)
        )
        family.add_metric(list(values.values()), 1)
        return family
