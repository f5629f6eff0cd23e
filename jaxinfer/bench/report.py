"""Figures of a serving benchmark: latencies, throughput and goodput, by vLLM's names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxinfer.bench.timeline import Timeline, max_concurrency

LATENCIES = {
    "ttft": "time to first token",
    "tpot": "time per output token",
    "itl": "inter-token latency",
    "e2el": "end to end",
}
SLOS = ("ttft", "tpot", "e2el")
"""Latencies that a request has one of."""


def summarize(
    timelines: Sequence[Timeline],
    duration: float,
    percentiles: Sequence[float],
    slos: Mapping[str, float] | None = None,
    names: Sequence[str] = tuple(LATENCIES),
) -> dict[str, Any]:
    """`names`: which latencies. `slos`: limits in ms, by the names in `SLOS`; a request is good when it meets all of them. Throughput is per
    second of `duration`, latencies are in ms and of requests that succeeded (None where there are none)."""
    done = [t for t in timelines if t.error is None]
    num_prompt = sum(t.num_prompt_tokens for t in done)
    num_output = sum(t.num_output_tokens for t in done)
    figures: dict[str, Any] = {
        "duration": duration,
        "completed": len(done),
        "failed": len(timelines) - len(done),
        "total_input_tokens": num_prompt,
        "total_output_tokens": num_output,
        "request_throughput": len(done) / duration,
        "request_goodput": None,
        "output_throughput": num_output / duration,
        "total_token_throughput": (num_prompt + num_output) / duration,
        "max_concurrent_requests": max_concurrency(done),
    }
    if slos:
        figures["request_goodput"] = sum(_is_good(t, slos) for t in done) / duration
    values = latencies(done)
    for name in names:
        figures |= _distribution(name, values[name], percentiles)
    return figures


def latencies(done: Sequence[Timeline]) -> dict[str, list[float]]:
    """In ms, by the names in `LATENCIES`, of requests that succeeded."""
    seconds: dict[str, list[float]] = {
        "ttft": [t.ttft for t in done],
        "tpot": [tpot for t in done if (tpot := t.tpot) is not None],
        "itl": [itl for t in done for itl in t.itls],
        "e2el": [t.e2el for t in done],
    }
    return {name: [1e3 * value for value in values] for name, values in seconds.items()}


def _is_good(timeline: Timeline, slos: Mapping[str, float]) -> bool:
    """An answer of one token meets any limit on the tokens after the first."""
    return all(1e3 * (getattr(timeline, name) or 0.0) <= limit for name, limit in slos.items())


def _distribution(name: str, values: list[float], percentiles: Sequence[float]) -> dict[str, Any]:
    functions = {"mean": np.mean, "median": np.median, "std": np.std}
    found = {
        f"{key}_{name}_ms": float(f(values)) if values else None for key, f in functions.items()
    }
    for p in percentiles:
        value = float(np.percentile(values, p)) if values else None
        found[f"p{p:g}_{name}_ms"] = value
    return found


def goodput_limits(texts: Sequence[str] | None) -> dict[str, float]:
    """From `ttft:200 tpot:50`, in ms. Raises `ValueError` for anything else."""
    return limits("goodput", texts or ())


def limits(flag: str, texts: Sequence[str]) -> dict[str, float]:
    found = {}
    for text in texts:
        name, _, value = text.partition(":")
        try:
            limit = float(value)
        except ValueError:
            limit = -1.0
        if name not in SLOS or not limit >= 0:
            raise ValueError(
                f"{flag} must be NAME:MILLISECONDS with a name of {SLOS}, got {text!r}."
            )
        found[name] = limit
    return found


def percentile_list(text: str) -> list[float]:
    """From `50,90,99`. Raises `ValueError` for what is no percentile."""
    try:
        values = [float(part) for part in text.split(",")]
    except ValueError:
        values = [-1.0]
    if not all(0 <= value <= 100 for value in values):
        raise ValueError(
            f"metric_percentiles must be numbers in [0, 100] with commas between them, got {text!r}."
        )
    return values


def latency_names(text: str) -> list[str]:
    """From `ttft,itl`. Raises `ValueError` for another name."""
    names = text.split(",")
    if unknown := [name for name in names if name not in LATENCIES]:
        raise ValueError(f"percentile_metrics may hold {tuple(LATENCIES)}, got {unknown}.")
    return names


def text_of(
    figures: Mapping[str, Any],
    percentiles: Sequence[float],
    names: Sequence[str] = tuple(LATENCIES),
) -> str:
    """The figures for people."""
    rows = [
        ("requests that succeeded", f"{figures['completed']}"),
        ("requests that failed", f"{figures['failed']}"),
        ("duration", f"{figures['duration']:.2f} s"),
        ("prompt tokens", f"{figures['total_input_tokens']}"),
        ("output tokens", f"{figures['total_output_tokens']}"),
        ("most requests at once", f"{figures['max_concurrent_requests']}"),
        ("requests", f"{figures['request_throughput']:.2f}/s"),
    ]
    if figures["request_goodput"] is not None:
        rows.append(("good requests", f"{figures['request_goodput']:.2f}/s"))
    rows += [
        ("output tokens", f"{figures['output_throughput']:.1f}/s"),
        ("all tokens", f"{figures['total_token_throughput']:.1f}/s"),
    ]
    lines = [f"{name:<28}{value:>14}" for name, value in rows]
    keys = ["mean", *(f"p{p:g}" for p in percentiles)]
    lines += ["", f"{'latency in ms':<28}" + "".join(f"{key:>14}" for key in keys)]
    for name in names:
        values = [figures[f"{key}_{name}_ms"] for key in keys]
        cells = "".join(f"{'-' if v is None else f'{v:.2f}':>14}" for v in values)
        lines.append(f"{f'{LATENCIES[name]} ({name})':<28}{cells}")
    return "\n".join(lines)
