"""A picture of a serving benchmark, as one SVG file that any browser shows: who waited when, and how long."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from pathlib import Path

from jaxinfer.bench.report import LATENCIES, latencies
from jaxinfer.bench.timeline import Timeline

_WIDTH, _HEIGHT = 560, 400
_LEFT, _TOP, _RIGHT, _BOTTOM = 60, 40, 20, 50
_COLORS = {"ttft": "#1f77b4", "tpot": "#2ca02c", "itl": "#ff7f0e", "e2el": "#9467bd"}
_WAIT, _DECODE = "#c7c7c7", "#1f77b4"
_MAX_POINTS = 400
"""Of one curve: more can't be seen."""


def write_plot(path: Path, timelines: Sequence[Timeline], title: str) -> None:
    """Left: a line per request over time, grey until its first token. Right: the share of requests (of intervals, for
    itl) within a latency, on a logarithmic axis. At least one request must have succeeded."""
    done = sorted((t for t in timelines if t.error is None), key=lambda t: t.start)
    panels = [_requests(done), _distributions(done)]
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{2 * _WIDTH}" height="{_HEIGHT}" font-family="sans-serif" font-size="12">',
        f'<rect width="{2 * _WIDTH}" height="{_HEIGHT}" fill="white"/>',
        f'<text x="{_WIDTH}" y="20" text-anchor="middle" font-size="14">{escape(title)}</text>',
    ]
    for i, panel in enumerate(panels):
        parts += [f'<g transform="translate({i * _WIDTH},0)">', *panel, "</g>"]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join([*parts, "</svg>"]) + "\n", encoding="utf-8")


def _x(share: float) -> float:
    return _LEFT + share * (_WIDTH - _LEFT - _RIGHT)


def _y(share: float) -> float:
    """0 is the bottom."""
    return _HEIGHT - _BOTTOM - share * (_HEIGHT - _TOP - _BOTTOM)


def _line(x0: float, y0: float, x1: float, y1: float, color: str, width: float = 1) -> str:
    return f'<line x1="{x0:.1f}" y1="{y0:.1f}" x2="{x1:.1f}" y2="{y1:.1f}" stroke="{color}" stroke-width="{width:.2f}"/>'


def _axes(x_ticks: Sequence[tuple[float, str]], x_label: str, y_label: str) -> list[str]:
    parts = [
        _line(_x(0), _y(0), _x(1), _y(0), "black"),
        _line(_x(0), _y(0), _x(0), _y(1), "black"),
        f'<text x="{_x(0.5)}" y="{_HEIGHT - 12}" text-anchor="middle">{x_label}</text>',
        f'<text transform="translate(16,{_y(0.5)}) rotate(-90)" text-anchor="middle">{y_label}</text>',
    ]
    for share, text in x_ticks:
        parts.append(_line(_x(share), _y(0), _x(share), _y(0) + 4, "black"))
        parts.append(
            f'<text x="{_x(share):.1f}" y="{_y(0) + 18}" text-anchor="middle">{text}</text>'
        )
    return parts


def _requests(done: Sequence[Timeline]) -> list[str]:
    start = done[0].start
    span = max(t.end for t in done) - start or 1.0
    ticks = [(i / 5, f"{span * i / 5:.3g}") for i in range(6)]
    parts = _axes(ticks, "seconds", f"{len(done)} requests, as they were sent")
    width = min(6.0, 0.8 * (_HEIGHT - _TOP - _BOTTOM) / len(done))
    for i, timeline in enumerate(done):
        y = _y(1 - (i + 0.5) / len(done))
        sent, first, last = (
            _x((moment - start) / span)
            for moment in (timeline.start, timeline.token_times[0], timeline.end)
        )
        parts += [_line(sent, y, first, y, _WAIT, width), _line(first, y, last, y, _DECODE, width)]
    return parts


def _distributions(done: Sequence[Timeline]) -> list[str]:
    found = {name: sorted(values) for name, values in latencies(done).items() if values}
    smallest = 1e-3  # ms: pieces that came in one packet have no interval to show
    low = math.floor(math.log10(max(min(values[0] for values in found.values()), smallest)))
    high = math.ceil(math.log10(max(values[-1] for values in found.values())))
    high = max(high, low + 1)

    def share(value: float) -> float:
        return (math.log10(max(value, 10.0**low)) - low) / (high - low)

    ticks = [(share(10.0**e), f"{10.0**e:g}") for e in range(low, high + 1)]
    parts = _axes(ticks, "milliseconds", "share within")
    for y in (0.5, 0.9, 0.99):
        parts.append(_line(_x(0), _y(y), _x(1), _y(y), "#e5e5e5"))
        parts.append(f'<text x="{_x(0) - 6}" y="{_y(y) + 4:.1f}" text-anchor="end">{y:g}</text>')
    for i, (name, values) in enumerate(found.items()):
        step = max(1, len(values) // _MAX_POINTS)
        points = [*range(0, len(values), step), len(values) - 1]
        path = " ".join(
            f"{_x(share(values[j])):.1f},{_y((j + 1) / len(values)):.1f}" for j in points
        )
        parts.append(
            f'<polyline points="{path}" fill="none" stroke="{_COLORS[name]}" stroke-width="2"/>'
        )
        y = _TOP + 14 + 16 * i
        parts.append(
            f'<text x="{_x(0) + 8}" y="{y}" fill="{_COLORS[name]}">{LATENCIES[name]}</text>'
        )
    return parts
