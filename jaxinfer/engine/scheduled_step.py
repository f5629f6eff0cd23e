"""A step as the scheduler remembers it until its tokens come back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from jaxinfer.engine.messages import Admission
from jaxinfer.engine.plan import Bool, Int32, StepPlan
from jaxinfer.engine.request import Request
from jaxinfer.engine.row_table import RowTable

Index = npt.NDArray[np.integer]


@dataclass(frozen=True, slots=True)
class Batch:
    """R rows and whose they were when the step was planned: a row may have passed to another request since."""

    rows: Int32
    epochs: npt.NDArray[np.int64]
    requests: list[Request]
    request_ids: list[str]

    @classmethod
    def of(cls, requests: Sequence[Request], table: RowTable) -> Batch:
        rows = np.array([r.row for r in requests], np.int32)
        return cls(rows, table.epoch[rows], list(requests), [r.request_id for r in requests])

    def take(self, index: Index) -> Batch:
        """The rows at these positions, in this order."""
        positions = index.tolist()
        return Batch(
            self.rows[index],
            self.epochs[index],
            [self.requests[i] for i in positions],
            [self.request_ids[i] for i in positions],
        )

    def live(self, table: RowTable) -> Bool:
        """Which rows [R] still belong to the request that they were planned for."""
        same: Bool = table.epoch[self.rows] == self.epochs
        return same


@dataclass(frozen=True, slots=True)
class ScheduledStep:
    """`batch` is aligned with the plan's rows; `all_sample`: every one of them gets a token. `forced`: by position in
    the plan, tokens that follow the sampled one because a grammar leaves no choice."""

    plan: StepPlan
    batch: Batch
    all_sample: bool
    first_scheduled: list[Admission]
    forced: dict[int, Int32] = field(default_factory=dict)
