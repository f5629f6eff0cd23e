"""Device time of JAX programs without device events, which JAX has not.

A program holds a chain of calls; programs are dispatched back to back, so that the device is never out of work, and only
the last one is waited for. The time of many programs over their number of calls is then the device's, as long as
the host launches faster than the device computes (`host_bound` says when it didn't). Every case warms up first, which
also brings the clocks up, and takes the median of repetitions. Inputs rotate over more memory than the L2 cache holds.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax

L2_BYTES = 60 << 20
"""Of an H200, as its driver reports it."""

_MOST_PROGRAMS = 16


@dataclass(frozen=True)
class Timing:
    seconds: float
    """Of one call."""
    spread: float
    """(slowest - fastest repetition) / median."""
    host_bound: bool
    """The host took nine tenths of the time to launch: the device may be faster."""

    def values(self) -> dict[str, Any]:
        more = {"host_bound": True} if self.host_bound else {}
        return {"seconds": self.seconds, "spread": round(self.spread, 3), **more}


def time_calls(
    dispatch: Callable[[int], Any],
    *,
    calls: int = 1,
    warm_seconds: float = 0.1,
    repetition_seconds: float = 0.03,
    repetitions: int = 5,
    wait: Callable[[Any], Any] = jax.block_until_ready,
) -> Timing:
    """`dispatch(i)` launches the i-th program, of `calls` calls each, and returns what `wait` can wait for."""
    count, begin = 0, time.perf_counter()
    while True:
        wait(dispatch(count))
        count += 1
        warmed = time.perf_counter() - begin
        if warmed > warm_seconds:
            break
    first = time.perf_counter()
    wait(dispatch(count))
    programs = max(1, round(repetition_seconds / max(time.perf_counter() - first, 1e-6)))
    times, launches = [], []
    for _ in range(repetitions):
        begin = time.perf_counter()
        for i in range(programs):
            out = dispatch(i)
        launched = time.perf_counter()
        wait(out)
        times.append(time.perf_counter() - begin)
        launches.append(launched - begin)
    median = statistics.median(times)
    return Timing(
        seconds=median / (programs * calls),
        spread=(max(times) - min(times)) / median,
        host_bound=programs > 1 and statistics.median(launches) > 0.9 * median,
    )


def rotating(program: Callable[..., Any], arguments: Sequence[tuple[Any, ...]]) -> Callable:
    """A dispatcher that gives `program` one set of arguments after the other."""
    return lambda i: program(*arguments[i % len(arguments)])


def settings(dry: bool) -> dict[str, Any]:
    """Arguments of `time_calls`."""
    if dry:
        return {"warm_seconds": 0.0, "repetition_seconds": 0.0, "repetitions": 2}
    return {}


def compile_chain(call: Callable[..., Any], fixed: Any, each: Any, length: int) -> Callable:
    """A program of `length` calls of `call(*fixed, *each)`; both are trees of arrays or of their shapes. The program
    takes `fixed` and a list of `length` trees like `each`."""

    # Traced and lowered once.
    once = jax.jit(call)

    def run(fixed: Any, calls: list[Any]) -> list[Any]:
        return [once(*fixed, *each) for each in calls]

    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (fixed, each))
    return jax.jit(run).lower(shapes[0], [shapes[1]] * length).compile()


def time_chain(
    program: Callable[..., Any],
    fixed: Any,
    make: Callable[[int], Any],
    length: int,
    bytes_per_call: int,
    dry: bool,
) -> Timing:
    """Times a program of `compile_chain`. `make(i)` is the i-th call's own arguments; enough of them are made that the
    calls read several times what the L2 cache holds before they read anything again."""
    count = max(1, min(_MOST_PROGRAMS, -(-4 * L2_BYTES // (bytes_per_call * length))))
    if dry:
        count = 1
    sets = [(fixed, [make(i * length + j) for j in range(length)]) for i in range(count)]
    return time_calls(rotating(program, sets), calls=length, **settings(dry))
