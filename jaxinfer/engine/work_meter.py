"""The work of each step in turn, which while the same requests decode is that of the step before and a little more."""

from __future__ import annotations

from jaxinfer.engine.plan import Int32
from jaxinfer.engine.scheduled_step import ScheduledStep
from jaxinfer.engine.stats import StepWork
from jaxinfer.engine.step_costs import StepCosts


class WorkMeter:
    """Says what `StepCosts.work` says, without looking at the rows of a batch that goes on decoding. Every step must
    pass, in order."""

    def __init__(self, costs: StepCosts) -> None:
        self._costs = costs
        self._has_windows = any(window is not None for window, _ in costs.windows)
        self._rows: Int32 | None = None
        """Of the step before, when each of its rows computed one token and sampled."""
        self._work = StepWork()
        self._more_flops = self._more_bytes = 0.0

    def step(self, step: ScheduledStep, num_tokens: int) -> StepWork:
        """`num_tokens` are the step's."""
        rows = step.plan.rows
        decodes = step.all_sample and num_tokens == len(rows) and not self._has_windows
        if not (decodes and rows is self._rows):
            self._rows = rows if decodes else None
            self._work = self._costs.work(step.plan, num_tokens)
            more_keys = num_tokens * self._costs.num_layers
            self._more_flops = more_keys * self._costs.pair_flops
            self._more_bytes = more_keys * self._costs.kv_bytes
            return self._work
        # Each row sees one token more than in the step before, in each layer.
        last, costs = self._work, self._costs
        flops, read = last.flops + self._more_flops, last.read_bytes + self._more_bytes
        self._work = StepWork(
            flops, read, last.write_bytes, costs.seconds(flops, read + last.write_bytes)
        )
        return self._work
