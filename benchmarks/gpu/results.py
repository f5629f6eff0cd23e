"""What a case of the GPU benchmark reported, and how it travels from a worker process to the run."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

STATUSES = ("ok", "wrong", "failed", "hung", "died", "not available", "skipped")
"""`ok` came with numbers; `wrong` with an error above its tolerance; every other one with a reason."""


@dataclass(frozen=True)
class Result:
    """One line of the report. `values` are plain numbers and strings (`seconds`, `fraction`, `error`, …)."""

    section: str
    case: str
    status: str
    reason: str = ""
    values: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.status not in STATUSES:
            raise ValueError(f"status must be one of {STATUSES}, got {self.status!r}")
        if self.status != "ok" and not self.reason:
            raise ValueError(f"reason must say why {self.case} is {self.status!r}, got ''")

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


class NotAvailable(Exception):
    """Raised by a case whose subject isn't here: a kernel that doesn't exist, a library, a device."""
