"""A section whose case needs what its process compiled beforehand."""

from __future__ import annotations

from typing import Any

from benchmarks.gpu.cases import Case, Context


def cases(context: Context) -> list[Case]:
    compiled: list[float] = []

    def run() -> dict[str, Any]:
        return {"seconds": compiled.pop()}

    return [Case("compiled in this process", run, compile=lambda: compiled.append(1e-3))]
