"""A section of the GPU benchmark whose cases do what kernels do on a bad day."""

from __future__ import annotations

import os
import time
from typing import Any

from benchmarks.gpu.cases import Case, Context
from benchmarks.gpu.results import NotAvailable


def cases(context: Context) -> list[Case]:
    return [
        Case("first", lambda: {"seconds": 1e-3}),
        Case("raises", _raise),
        Case("wrong", lambda: {"error": 0.5, "tolerance": 0.1}),
        Case("not a number", lambda: {"error": float("nan"), "tolerance": 0.1}),
        Case("hangs", lambda: time.sleep(60), limit=0.2),
        Case("dies", lambda: os._exit(9)),
        Case("missing", _missing),
        Case("last", lambda: {"seconds": 2e-3}),
    ]


def _raise() -> dict[str, Any]:
    raise RuntimeError("the kernel did not\ncompile")


def _missing() -> dict[str, Any]:
    raise NotAvailable("no such kernel")
