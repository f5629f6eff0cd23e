"""Jobs for `compile_job`: the library compiled from copies of its source that lack something."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any


def problems_of_copies(copies: dict[str, dict[str, Any]]) -> dict[str, list[str]]:
    """By copy (the directory that holds its `kernels_pallas`), what is wrong with one case compiled from it."""
    return {root: _problems(root, case) for root, case in copies.items()}


def _problems(root: str, case: dict[str, Any]) -> list[str]:
    for name in [name for name in sys.modules if name.split(".")[0] == "kernels_pallas"]:
        del sys.modules[name]
    sys.path.insert(0, root)
    try:
        measure = importlib.import_module("kernels_pallas.compile_table.measure")
        assert Path(measure.__file__).is_relative_to(root)
        rows = measure.measure([case], "h200")
    finally:
        sys.path.remove(root)
    return [problem for row in rows for problem in row["problems"]]
