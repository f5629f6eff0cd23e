"""What the engine core's steps add up to: the host's time by phase, the device's work and its memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from jaxinfer import metrics
from jaxinfer.engine.stats import DeviceMemory, HostSeconds, SchedulerStats, StepWork

_PHASES = HostSeconds.__struct_fields__
_WORK = {
    "flops": ("estimated_flops_per_gpu", "Operations of one device, estimated"),
    "read_bytes": ("estimated_read_bytes_per_gpu", "Bytes that it read from memory, estimated"),
    "write_bytes": ("estimated_write_bytes_per_gpu", "Bytes that it wrote, estimated"),
    "roofline_seconds": (
        "roofline_seconds",
        "What the steps take at the device's peaks; 0 where they aren't known",
    ),
}
"""By field of `StepWork`; the first three are vLLM's names."""


class StepTotals:
    """Plain sums, added to in each step and made into metrics when they are read."""

    def __init__(self) -> None:
        self._num_steps = 0
        self._seconds = HostSeconds()
        self._work = StepWork()
        self._memory: DeviceMemory | None = None

    def add(self, stats: SchedulerStats) -> None:
        self._num_steps += 1
        if (work := stats.work) is not None:
            mine = self._work
            mine.flops += work.flops
            mine.read_bytes += work.read_bytes
            mine.write_bytes += work.write_bytes
            mine.roofline_seconds += work.roofline_seconds
        if (seconds := stats.seconds) is not None:
            total = self._seconds
            total.schedule += seconds.schedule
            total.launch += seconds.launch
            total.wait += seconds.wait
            total.update += seconds.update
        if stats.memory is not None:
            self._memory = stats.memory

    def snapshot(self, prefix: str, labels: Mapping[str, str]) -> Iterator[metrics.Metric]:
        def counter(name: str, text: str, value: float, **more: str) -> metrics.Counter:
            return metrics.Counter(prefix + name, {**labels, **more}, value, text=text)

        yield counter("engine_steps", "Steps of the engine", self._num_steps)
        for phase in _PHASES:
            yield counter(
                "step_host_seconds",
                "Where the engine core's thread was, by phase of a step; wait is for the device",
                getattr(self._seconds, phase),
                phase=phase,
            )
        for field, (name, text) in _WORK.items():
            yield counter(name, text, getattr(self._work, field))
        if self._memory is not None:
            for name, text, value in (
                ("used", "in use", self._memory.used_bytes),
                ("limit", "that may be used", self._memory.limit_bytes),
            ):
                yield metrics.Gauge(
                    f"{prefix}device_memory_{name}_bytes",
                    dict(labels),
                    value,
                    text=f"Bytes of the first device {text}; on a CPU, the engine core's and the machine's",
                )
