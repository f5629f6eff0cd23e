"""Counts what happens to requests and in steps, from what the engine core and the outputs report. The numbers are read
as `jaxinfer.metrics` objects; the server shows the same ones to Prometheus."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence

from jaxinfer import metrics
from jaxinfer.config import EngineConfig
from jaxinfer.engine.messages import EngineCoreOutputs, FinishReason
from jaxinfer.engine.stats import SchedulerStats, SpecDecodeStats
from jaxinfer.frontend.histograms import (
    ITL,
    LATENCY,
    PREFIX,
    TOKENS_PER_STEP,
    TTFT,
    Histogram,
    steps,
)
from jaxinfer.frontend.processor import PreparedRequest
from jaxinfer.frontend.step_totals import StepTotals
from jaxinfer.outputs import RequestMetrics, RequestOutput
from jaxinfer.sampling_params import RequestOutputKind

_REASONS = tuple(str(reason) for reason in FinishReason)
_SLEEP_STATES = ("awake", "weights_offloaded", "discard_all")
"""By the level of sleep."""
QUEUE_LIMITS = ("max_num_queued_reqs",)
"""Why requests are turned away."""


class EngineMetrics:
    """`num_unfinished` says whether the engine has anything to do: with nothing, it takes no step that would report that
    nothing runs. `num_blocks`: of the KV cache, where it is known. `core`: the number of the engine core. For one
    thread at a time."""

    def __init__(
        self,
        config: EngineConfig,
        num_unfinished: Callable[[], int],
        num_blocks: int | None,
        core: int = 0,
    ) -> None:
        self._core = core
        self.model_name = config.model.served_model_name or config.model.model
        self._config = config
        self._num_blocks = num_blocks
        self._num_unfinished = num_unfinished
        self._stats = SchedulerStats()
        self._step_time = 0.0
        self._counts: Counter[str] = Counter()
        self._steps = StepTotals()
        self._sleep_level = 0
        self._ends: Counter[str] = Counter()
        speculative = config.speculative
        self._accepted = [0] * (speculative.num_speculative_tokens if speculative else 0)
        self._last_token: dict[str, float] = {}
        """Per completion: when its last token came, or minus its arrival while there is none."""
        longest = steps(config.model.max_model_len)
        made: list[Histogram] = []

        def histogram(name: str, text: str, bounds: Sequence[float]) -> Histogram:
            made.append(Histogram(name, text, bounds))
            return made[-1]

        self._iteration = histogram("iteration_tokens_total", "Tokens per step", TOKENS_PER_STEP)
        self._prompt = histogram("request_prompt_tokens", "Prompt tokens per request", longest)
        self._computed = histogram(
            "request_prefill_kv_computed_tokens", "Prompt tokens not found in the cache", longest
        )
        self._generation = histogram("request_generation_tokens", "Tokens generated", longest)
        self._longest = histogram(
            "request_max_num_generation_tokens", "Tokens of a request's longest output", longest
        )
        self._preempted = histogram(
            "request_num_preemptions", "Times that a request was put back", (0, *steps(100))
        )
        self._n = histogram("request_params_n", "The parameter n", (1, 2, 5, 10, 20))
        self._limit = histogram("request_params_max_tokens", "The parameter max_tokens", longest)
        self._ttft = histogram("time_to_first_token_seconds", "Time to first token", TTFT)
        self._itl = histogram("inter_token_latency_seconds", "Between two tokens", ITL)
        self._per_token = histogram(
            "request_time_per_output_token_seconds", "Mean time between a request's tokens", ITL
        )
        self._e2e = histogram("e2e_request_latency_seconds", "Arrival to end", LATENCY)
        self._queue = histogram("request_queue_time_seconds", "Waiting to be run", LATENCY)
        self._prefill = histogram("request_prefill_time_seconds", "Run to first token", LATENCY)
        self._decode = histogram("request_decode_time_seconds", "First token to last", LATENCY)
        self._inference = histogram("request_inference_time_seconds", "Run to last token", LATENCY)
        self._histograms = made

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
            self._step_time = time.time()
            self._sleep_level = 0  # also of a core that took the place of one that slept
            for name in ("num_preemptions", "prefix_cache_queries", "prefix_cache_hits"):
                self._counts[name] += getattr(stats, name)
            self._iteration.observe(stats.num_scheduled_tokens)
            self._steps.add(stats)
            if stats.spec_decode is not None:
                self._count_drafts(stats.spec_decode)
        self._counts["generation_tokens"] += len(outputs.token_ids)
        self._time_tokens(outputs.request_ids, outputs.timestamp)

    def _count_drafts(self, stats: SpecDecodeStats) -> None:
        for name in ("num_drafts", "num_draft_tokens", "num_accepted_tokens"):
            self._counts[f"spec_decode_{name}"] += getattr(stats, name)
        for position, count in enumerate(stats.num_accepted_tokens_per_pos):
            self._accepted[position] += count

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

    def slept(self, level: int) -> None:
        """Since now; 0: the engine is awake."""
        self._sleep_level = level

    def turned_away(self, limit: str) -> None:
        """A request, by one of `QUEUE_LIMITS`."""
        self._counts[limit] += 1

    def request_output(self, request: PreparedRequest, output: RequestOutput) -> None:
        is_cumulative = request.sampling_params.output_kind is RequestOutputKind.CUMULATIVE
        if output.finished or not is_cumulative:
            for completion in output.outputs:
                if completion.finish_reason is not None:
                    self._ends[completion.finish_reason] += 1
        if not output.finished:
            return
        for core_request in request.core_requests:
            self._last_token.pop(core_request.request_id, None)
        self._prompt.observe(len(request.prompt_token_ids))
        self._counts["prompt_tokens"] += len(request.prompt_token_ids)
        self._counts["prompt_tokens_cached"] += output.num_cached_tokens
        self._computed.observe(len(request.prompt_token_ids) - output.num_cached_tokens)
        if output.metrics is not None:
            self._observe_times(output.metrics, request.sampling_params.n)

    def _observe_times(self, metrics: RequestMetrics, n: int) -> None:
        self._generation.observe(metrics.num_generation_tokens)
        self._longest.observe(metrics.max_num_generation_tokens)
        self._preempted.observe(metrics.num_preemptions)
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

    # ---- what is read ------------------------------------------------------------------------------------------------

    @property
    def labels(self) -> dict[str, str]:
        """Of all metrics."""
        return {"model_name": self.model_name, "engine": str(self._core)}

    def snapshot(self) -> list[metrics.Metric]:
        stats = self._stats if self._num_unfinished() else SchedulerStats()
        labels = self.labels

        def gauge(name: str, text: str, value: float, **more: str) -> metrics.Gauge:
            return metrics.Gauge(PREFIX + name, labels | more, value, text=text)

        def counter(name: str, text: str) -> metrics.Counter:
            return metrics.Counter(PREFIX + name, labels, self._counts[name], text=text)

        num_cached = self._counts["prompt_tokens_cached"]
        by_reason = {
            "capacity": stats.num_waiting - stats.num_deferred,
            "deferred": stats.num_deferred,
        }
        by_source = {
            "local_compute": self._counts["prompt_tokens"] - num_cached,
            "local_cache_hit": num_cached,
        }
        return [
            gauge("num_requests_running", "Requests that run", stats.num_running),
            gauge("num_requests_waiting", "Requests that wait", stats.num_waiting),
            *(
                gauge(
                    "num_requests_waiting_by_reason",
                    "Requests that wait: for room, or for what they need themselves (deferred)",
                    number,
                    reason=reason,
                )
                for reason, number in by_reason.items()
            ),
            *(
                gauge(
                    "engine_sleep_state",
                    "1 for the state",
                    int(level == self._sleep_level),
                    sleep_state=state,
                )
                for level, state in enumerate(_SLEEP_STATES)
            ),
            gauge("kv_cache_usage_perc", "Used share of the KV cache", stats.kv_cache_usage),
            gauge(
                "num_compilations",
                "Programs compiled after start-up; not 0 means that requests had to wait for them",
                self._stats.num_compilations,
            ),
            counter("num_preemptions", "Requests put back to be recomputed"),
            counter("prefix_cache_queries", "Prompt tokens looked for in the prefix cache"),
            counter("prefix_cache_hits", "Prompt tokens found there"),
            counter("prompt_tokens", "Prompt tokens of finished requests"),
            counter("prompt_tokens_cached", "Those of them that weren't computed again"),
            *(
                metrics.Counter(
                    f"{PREFIX}prompt_tokens_by_source",
                    labels | {"source": source},
                    number,
                    text="Prompt tokens of finished requests, computed or found in the prefix cache",
                )
                for source, number in by_source.items()
            ),
            *(
                metrics.Counter(
                    f"{PREFIX}admission_rejections",
                    labels | {"reason": limit},
                    self._counts[limit],
                    text="Requests that the server turned away, by the limit of its queue",
                )
                for limit in QUEUE_LIMITS
            ),
            counter("generation_tokens", "Tokens generated"),
            *self._spec_decode(labels),
            *self._adapters(labels, stats),
            *(
                metrics.Counter(
                    f"{PREFIX}request_success",
                    labels | {"finished_reason": reason},
                    self._ends[reason],
                    text="Completions that ended, by reason",
                )
                for reason in _REASONS
            ),
            *self._steps.snapshot(PREFIX, labels),
            *(histogram.snapshot(labels) for histogram in self._histograms),
            gauge("cache_config_info", "The KV cache", 1, **self._cache_labels()),
        ]

    def _spec_decode(self, labels: dict[str, str]) -> list[metrics.Metric]:
        if self._config.speculative is None:
            return []
        texts = {
            "num_drafts": "Times that tokens were guessed",
            "num_draft_tokens": "Tokens guessed",
            "num_accepted_tokens": "Guessed tokens that were right",
        }
        counters: list[metrics.Metric] = [
            metrics.Counter(
                f"{PREFIX}spec_decode_{name}",
                labels,
                self._counts[f"spec_decode_{name}"],
                text=text,
            )
            for name, text in texts.items()
        ]
        return [
            *counters,
            metrics.Vector(
                f"{PREFIX}spec_decode_num_accepted_tokens_per_pos",
                labels,
                list(self._accepted),
                text="Those, by their place among the guesses of a step",
            ),
        ]

    def _adapters(self, labels: dict[str, str], stats: SchedulerStats) -> list[metrics.Metric]:
        if self._config.lora is None:
            return []
        return [
            metrics.Gauge(
                f"{PREFIX}lora_requests_info",
                labels
                | {
                    "max_lora": str(self._config.lora.max_loras),
                    "running_lora_adapters": ",".join(stats.running_adapters),
                    "waiting_lora_adapters": ",".join(stats.waiting_adapters),
                },
                self._step_time,
                text="Adapters that requests run and wait with, and when the last step ended (Unix seconds)",
            )
        ]

    def _cache_labels(self) -> dict[str, str]:
        cache = self._config.cache
        return {
            "block_size": str(cache.block_size),
            "cache_dtype": cache.dtype or self._config.model.dtype,
            "num_gpu_blocks": str(self._num_blocks),
            "gpu_memory_utilization": str(cache.gpu_memory_utilization),
        }
