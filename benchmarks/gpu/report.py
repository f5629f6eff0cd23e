"""The run in Markdown, for people, and in JSON, for later comparison."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu.results import Result
from benchmarks.gpu.sections import Section
from benchmarks.gpu.targets import TARGETS

MEASURED, STATIC = "measured", "static"
"""Parts of docs/gpu_results.md that are written by commands, each between two marks."""
_SHOWN_ELSEWHERE = (
    "seconds",
    "floor_seconds",
    "fraction",
    "of",
    "error",
    "tolerance",
    "case_seconds",
)


def render(
    head: dict[str, Any], sections: Sequence[Section], results: Sequence[Result], dry: bool
) -> str:
    """Targets first, then a table per section."""
    lines = [f"{name}: {value}  " for name, value in head.items()]
    if dry:
        lines += ["", "**A dry run on tiny shapes: the numbers mean nothing.**"]
    lines += ["", "| target | wanted | reached | |", "|---|---|---|---|"]
    for target in TARGETS:
        reached = target.reached(results)
        value = "" if reached is None else f"{reached:.2f}"
        lines.append(f"| {target.text} | {target.least:g} | {value} | {target.verdict(results)} |")
    for section in sections:
        lines += ["", f"### {section.title}", ""]
        lines += ["| case | result | time | fraction | more |", "|---|---|---|---|---|"]
        lines += [_row(result) for result in results if result.section == section.name]
    return "\n".join([*lines, ""])


def _row(result: Result) -> str:
    values = result.values
    outcome = result.status
    if "error" in values and result.status in ("ok", "wrong"):
        outcome = f"{result.status}, error {values['error']:.1e}"
    fraction = ""
    if "fraction" in values:
        fraction = f"{values['fraction']:.3g} of {values.get('of', 'its floor')}"
    more = [
        f"{_words(k)} {_quantity(k, v)}" for k, v in values.items() if k not in _SHOWN_ELSEWHERE
    ]
    reason = " ".join(result.reason.split()).replace("|", "/")[:240]
    notes = "; ".join([*([reason] if reason else []), *more])
    seconds = _quantity("seconds", values["seconds"]) if "seconds" in values else ""
    return f"| {result.case} | {outcome} | {seconds} | {fraction} | {notes} |"


def _words(name: str) -> str:
    return name.removesuffix("_seconds").replace("_", " ")


def _quantity(name: str, value: Any) -> str:
    if isinstance(value, bool | str) or value is None:
        return str(value)
    if name.endswith("bytes_per_second"):
        return f"{value / 1e12:.3f} TB/s"
    if name.endswith("flops_per_second"):
        return f"{value / 1e12:.1f} TFLOP/s"
    if name.endswith("bytes"):
        return f"{value / 2**30:.2f} GiB"
    if name.endswith("seconds"):
        for factor, unit in ((1, "s"), (1e3, "ms"), (1e6, "µs")):
            if value * factor >= 1 or unit == "µs":
                return f"{value * factor:.3g} {unit}"
    if name.endswith("tokens_per_second"):
        return f"{value:,.0f}"
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def as_json(
    head: dict[str, Any], results: Sequence[Result], section_seconds: dict[str, float], dry: bool
) -> dict[str, Any]:
    """Everything, with numbers that aren't finite as null."""
    return _finite(
        {
            **head,
            "dry": dry,
            "section_seconds": section_seconds,
            "targets": [
                {
                    "text": target.text,
                    "wanted": target.least,
                    "stretch": target.stretch,
                    "reached": target.reached(results),
                    "verdict": target.verdict(results),
                }
                for target in TARGETS
            ],
            "results": [result.as_dict() for result in results],
        }
    )


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def write_json(path: Path, content: dict[str, Any]) -> None:
    """All or nothing: what was written last stays readable whenever the run is stopped."""
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(content, indent=1) + "\n")
    temporary.replace(path)


def put_between(page: Path, part: str, text: str) -> None:
    """Replace what stands between the marks of a part. Raises `ValueError` for a page without them."""
    begin, end = f"<!-- {part}: begin -->", f"<!-- {part}: end -->"
    old = page.read_text()
    if begin not in old or end not in old:
        raise ValueError(f"{page} has no lines {begin!r} and {end!r} to write between")
    before, after = old.split(begin)[0], old.split(end)[1]
    page.write_text(f"{before}{begin}\n{text}\n{end}{after}")
