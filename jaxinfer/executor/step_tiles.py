"""A step's plan cut into tiles of a fixed number of tokens, each of which is a plan of its own."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from jaxinfer.engine.plan import Int32, StepPlan

_NONE: Int32 = np.empty(0, np.int32)


class StepTile(NamedTuple):
    """At most `tile` tokens of a step. A row whose tokens don't end here samples in the tile that has its last one."""

    plan: StepPlan
    index: np.ndarray
    """[R] where the tile's rows are among those of the whole plan."""


def cut_into_tiles(plan: StepPlan, tile: int) -> list[StepTile]:
    """The plan's tokens in tiles of `tile`, the last one of fewer. Admissions, forced tokens and block entries are left
    out: they are taken over before.

    Tiles run one after the other, so a row comes after those that compute, in this very step, blocks that it reads. Only
    rows admitted in the step read such blocks, and they begin after the row that computes them does. Tokens that only
    the device has are among the first, each its row's only one.
    """
    newcomers = [admitted.row for admitted in plan.admitted]
    begun = (plan.num_scheduled == 1) & ~np.isin(plan.rows, newcomers)
    others = np.flatnonzero(~begun)
    order = np.concatenate(
        [np.flatnonzero(begun), others[np.argsort(plan.num_computed[others], kind="stable")]]
    )
    counts = plan.num_scheduled[order]
    ends = np.cumsum(counts)
    starts = ends - counts
    return [
        _tile(plan, order, starts, ends, first, first + tile)
        for first in range(0, int(ends[-1]), tile)
    ]


def _tile(
    plan: StepPlan, order: np.ndarray, starts: np.ndarray, ends: np.ndarray, first: int, last: int
) -> StepTile:
    """Tokens `first` up to `last` of the plan's in `order`, where row i has those from `starts[i]` to `ends[i]`."""
    within = slice(np.searchsorted(ends, first, "right"), np.searchsorted(starts, last, "left"))
    index, starts, ends = order[within], starts[within], ends[within]
    begins = np.maximum(starts, first)
    part = StepPlan(
        admitted=[],
        rows=plan.rows[index],
        num_scheduled=(np.minimum(ends, last) - begins).astype(np.int32),
        num_computed=(plan.num_computed[index] + (begins - starts)).astype(np.int32),
        samples=plan.samples[index] & (ends <= last),
        block_rows=_NONE,
        block_cols=_NONE,
        block_ids=_NONE,
    )
    return StepTile(part, index)
