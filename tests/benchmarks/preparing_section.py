"""A case that needs what its process compiled beforehand, which takes two seconds."""

from __future__ import annotations

import time
from typing import Any

from benchmarks.gpu.cases import Case, Context


def cases(context: Context) -> list[Case]:
    compiled: list[float] = []

    def compile_slowly() -> None:
        for _ in range(20):
            time.sleep(0.1)
        compiled.append(1e-3)

    def run() -> dict[str, Any]:
        return {"seconds": compiled.pop()}

    return [Case("compiled in this process", run, compile=compile_slowly)]
