"""What the kernels and the engine are meant to reach on an H200, and whether they did."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.gpu.results import Result


@dataclass(frozen=True)
class Target:
    """A case's value must reach `least`; with `against`, the ratio of that case's seconds to this one's must."""

    text: str
    section: str
    case: str
    least: float
    value: str = "fraction"
    against: str | None = None
    stretch: float | None = None

    def reached(self, results: Sequence[Result]) -> float | None:
        """None where it wasn't measured."""
        found = {
            r.case: r.values for r in results if r.section == self.section and r.status == "ok"
        }
        if self.case not in found:
            return None
        if self.against is None:
            return found[self.case].get(self.value)
        if self.against not in found:
            return None
        return found[self.against]["seconds"] / found[self.case]["seconds"]

    def verdict(self, results: Sequence[Result]) -> str:
        value = self.reached(results)
        if value is None:
            return "not measured"
        if self.stretch is not None and value >= self.stretch:
            return "met (the stretch target too)"
        return "met" if value >= self.least else "missed"


TARGETS = (
    Target("decode, 64 x 4 k, of copy bandwidth", "decode", "64 x 4096, GQA 4", 0.85),
    Target("decode, 16 x 8 k, of copy bandwidth", "decode", "16 x 8192, GQA 4", 0.70),
    Target("decode, 1 x 128 k, of copy bandwidth", "decode", "1 x 131072, GQA 4", 0.70),
    Target("prefill, 8 k causal, of matmul peak", "prefill", "1 x 8192", 0.55, stretch=0.70),
    Target(
        "shared prefix over plain, 64 x 4 k",
        "cache",
        "shared prefix, 64 over 4096",
        3.0,
        against="plain, 64 over 4096",
    ),
    Target("engine, 128 concurrent, of roofline", "engine", "128 x 1000 in, 1000 out", 0.80),
    Target("GPU busy, 128 concurrent", "engine", "128 x 1000 in, 1000 out", 0.92, value="busy"),
    Target("GPU busy, 256 concurrent", "engine", "256 x 1000 in, 1000 out", 0.92, value="busy"),
)
