"""A section is a list of cases; a worker runs them one by one and reports each by itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Case:
    """One thing to measure or to check."""

    name: str
    run: Callable[[], dict[str, Any]]
    """Its numbers. An `error` above `tolerance` makes the result wrong. Raises `NotAvailable` or anything else."""
    compile: Callable[[], Any] | None = None
    """What of it can be compiled ahead, in any thread and beside others."""
    limit: float = 30.0
    """Seconds after which it counts as hung, compilation included."""


@dataclass(frozen=True)
class Context:
    """What a section is told about the run."""

    dry: bool = False
    """Tiny shapes on a CPU: nothing is measured, but every line runs."""
    bandwidth: float = 4.3e12
    """Bytes per second of a copy, read and written; what was measured in this run, once it was."""
    matmul: float = 780e12
    """bfloat16 FLOP per second of a large matrix product, likewise."""

    @property
    def patience(self) -> float:
        """Factor on every time limit: a dry run may find its machine busy, and is after other things than time."""
        return 4.0 if self.dry else 1.0

    def pick(self, real: Any, dry: Any) -> Any:
        """A size for the GPU or for the dry run."""
        return dry if self.dry else real
