"""A section that is soon through."""

from __future__ import annotations

from benchmarks.gpu.cases import Case, Context


def cases(context: Context) -> list[Case]:
    return [Case("quick", lambda: {"seconds": 1e-3})]
