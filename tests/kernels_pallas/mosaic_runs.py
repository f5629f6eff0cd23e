"""What the tests of the Mosaic GPU kernels share: their jobs, and what a right and a wrong run look like.

`make test` runs the cases that together take every branch, option and way through the work's plan, with three fills and more
of every slot of a pipeline; of the planted faults one or more of each kind (a wait left out, a wrong count of arrivals,
a slot given up too early, a mask, a place in the plan); and it compiles cases that hold every size, dtype and option
once. `MOSAIC_ATTENTION_LONG=1` (`make test-kernels`) runs all cases, all faults and random batches, and compiles every
combination that a kernel claims. On the oldest JAX there are a case or two of each kernel and a fault.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest

from kernels_pallas.compile_job import run_job

LONG = bool(os.environ.get("MOSAIC_ATTENTION_LONG"))
STUCK = "no progress"
"""`mosaic_jobs.STUCK`, without importing Pallas."""

# What is compiled to interpret a kernel runs once.
QUICK_TO_COMPILE = {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}

Call = tuple[str, dict[str, Any]]
"""Of `module:function`, with its arguments."""

long_run = pytest.mark.skipif(not LONG, reason="long run: MOSAIC_ATTENTION_LONG=1")


def params(names: Iterable[str], jax_floor: Iterable[str]) -> list[Any]:
    """Names as parameters of a test, of which some run on the oldest JAX too."""
    floor, marks = set(jax_floor), [pytest.mark.jax_floor]
    return [pytest.param(name, marks=marks if name in floor else ()) for name in names]


def job(function: str, timeout: float = 600, env: dict | None = None, **arguments: Any) -> Any:
    """`run_job`, of a module of this directory."""
    path = (str(Path(__file__).parent),)
    return run_job(function, arguments, timeout=timeout, env=env, python_path=path)


def with_fault(call: Call, module: str, edits: list[tuple[str, str]]) -> Call:
    function, arguments = call
    more = {"function": function, "arguments": arguments, "module": module, "edits": edits}
    return "mosaic_jobs:with_fault", more


def outcomes_of(
    request: pytest.FixtureRequest, calls: Mapping[str, Mapping[str, Call]], limit: int = 300
) -> dict[str, dict[str, Any]]:
    """Of the calls that the tests of the requesting module need that are selected and not skipped, by the tests' names.

    `calls` are by name of the test function and by its parameter's id. Two run at a time, in processes of their own.
    """
    needed = {
        item.name: calls[item.originalname][item.callspec.id]
        for item in request.session.items
        if item.path == request.path
        and item.originalname in calls
        and not any(mark.args[0] for mark in item.iter_markers("skipif"))
    }
    timeout = 60 + limit * len(needed)
    return job("mosaic_jobs:outcomes", timeout, QUICK_TO_COMPILE, calls=needed, limit=limit)


def problem(result: dict[str, Any]) -> str | None:
    """What is wrong with a run, or None."""
    if result["races"]:
        return "race"
    for name, holds in result["holds"].items():
        if not holds:
            return f"not {name}"
    for name, (error, tolerance) in result["errors"].items():
        if not error < tolerance:
            return f"error of {name} {error:.3g}"
    return None


def assert_right(outcome: dict[str, Any]) -> None:
    assert "result" in outcome, outcome["error"]
    print(outcome["result"])
    assert problem(outcome["result"]) is None, outcome["result"]


def assert_caught(outcome: dict[str, Any]) -> None:
    if "result" in outcome:
        found = problem(outcome["result"])
    else:
        found = outcome["error"][-300:]
        # A race, a misused barrier or an index out of bounds, noticed by the interpreter, or a wait without end.
        # Not a slow machine, nor a fault that could not be planted.
        signs = (
            "RACE DETECTED",
            "Barrier",
            "barrier",
            "Thread",
            "but buffer has shape",
            "before kernel",
            STUCK,
        )
        assert "took longer" not in found, found
        assert any(sign in outcome["error"] for sign in signs), outcome["error"]
    print(found)
    assert found is not None
