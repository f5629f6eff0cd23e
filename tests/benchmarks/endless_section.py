"""A section whose second case never ends, and sets its whole budget as its limit."""

from __future__ import annotations

import time

from benchmarks.gpu.cases import Case, Context


def cases(context: Context) -> list[Case]:
    return [
        Case("quick", lambda: {"seconds": 1e-3}),
        Case("endless", lambda: time.sleep(600), limit=600),
        Case("never reached", lambda: {"seconds": 1e-3}),
    ]
