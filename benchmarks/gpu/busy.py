"""How much of a stretch of time the GPU computed, read from a profile of `jax.profiler`, without TensorBoard."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import jax

Interval = tuple[float, float]
"""Begin and end, in nanoseconds."""


@dataclass(frozen=True)
class Busy:
    """Of the time between the first and the last kernel, `busy_seconds` had one running."""

    span_seconds: float
    busy_seconds: float
    num_kernels: int

    @property
    def fraction(self) -> float:
        return self.busy_seconds / self.span_seconds


def measure_busy(run: Callable[[], object]) -> Busy:
    """Profiles `run`, which must have waited for the device. Raises `LookupError` for a profile without kernels."""
    options = jax.profiler.ProfileOptions()
    # Every Python call would be recorded, and the host be slowed to several times its pace.
    options.python_tracer_level = 0
    if jax.default_backend() == "gpu":
        options.host_tracer_level = 0
    with tempfile.TemporaryDirectory(prefix="profile-") as folder:
        with jax.profiler.trace(folder, profiler_options=options):
            run()
        (path,) = Path(folder).rglob("*.xplane.pb")
        kernels = list(device_intervals(jax.profiler.ProfileData.from_file(str(path))))
    if not kernels:
        raise LookupError("the profile holds no kernels")
    merged = merge(kernels)
    span = max(end for _, end in kernels) - min(begin for begin, _ in kernels)
    return Busy(span / 1e9, sum(end - begin for begin, end in merged) / 1e9, len(kernels))


def device_intervals(profile: jax.profiler.ProfileData) -> Iterable[Interval]:
    """Of everything that ran on a GPU's streams; on a CPU, of what XLA's threads did."""
    planes = list(profile.planes)
    gpu = [plane for plane in planes if plane.name.startswith("/device:GPU")]
    for plane in gpu or planes:
        for line in plane.lines:
            if line.name.startswith("Stream") if gpu else "XLA" in line.name:
                for event in line.events:
                    yield event.start_ns, event.start_ns + event.duration_ns


def merge(intervals: Iterable[Interval]) -> list[Interval]:
    """The union, as intervals that don't overlap, in order."""
    merged: list[Interval] = []
    for begin, end in sorted(intervals):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((begin, end))
    return merged
