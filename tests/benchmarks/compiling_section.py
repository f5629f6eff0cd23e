"""A section one of whose programs takes the process down when it is compiled."""

from __future__ import annotations

import os

from benchmarks.gpu.cases import Case, Context


def cases(context: Context) -> list[Case]:
    return [
        Case("good", lambda: {"seconds": 1e-3}, compile=lambda: None),
        Case("bad", lambda: {"seconds": 1e-3}, compile=lambda: os._exit(11)),
        Case("refused", lambda: {"seconds": 1e-3}, compile=_refuse),
        Case("good too", lambda: {"seconds": 1e-3}),
    ]


def _refuse() -> None:
    raise ValueError("too much shared memory")
