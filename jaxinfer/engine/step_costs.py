"""What a step costs the device, estimated from the model's dimensions and the step's plan."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from jaxinfer.engine.plan import StepPlan
from jaxinfer.engine.stats import StepWork


@dataclass(frozen=True, slots=True)
class StepCosts:
    """Of one device; a multiply-add is two operations.

    Counted are the matrix products, the weights (read once a step), and the KV cache (each row's context read once per
    layer, each new token written once). Not counted: norms, activations, sampling, padding, activations that leave the
    chip. Rows that read a shared prefix together are counted as if each read it.

    token_flops: Per computed token, without attention scores and the head.
    logits_flops: Per row that samples, and per draft.
    pair_flops: Per layer, for one query token and one key that it sees.
    weight_bytes: Read in every step.
    kv_bytes: Keys and values of one token in one layer.
    state_bytes: A row's states, over all layers, which a step reads and writes once.
    windows: Layers by their attention window (None: all tokens), as (window, number of layers).
    peak_flops, peak_bandwidth: The device's, a second; None where they aren't known.
    """

    token_flops: float
    logits_flops: float
    pair_flops: float
    weight_bytes: float
    kv_bytes: float
    windows: tuple[tuple[int | None, int], ...]
    state_bytes: float = 0.0
    peak_flops: float | None = None
    peak_bandwidth: float | None = None

    num_layers: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "num_layers", sum(number for _, number in self.windows))

    def work(self, plan: StepPlan, num_tokens: int) -> StepWork:
        """`num_tokens` are the plan's, which whoever calls has counted. A token in the middle of its row's new ones
        stands for all of them where a window cuts off their contexts."""
        if num_tokens == len(plan.num_scheduled):
            pairs = keys = float(self._seen_by_decodes(plan, num_tokens))
        else:
            pairs, keys = self._seen(plan)
        flops = num_tokens * self.token_flops + pairs * self.pair_flops
        num_sampled = int(np.count_nonzero(plan.samples))
        if plan.drafts is not None:
            num_sampled += len(plan.drafts.token_ids)
        flops += num_sampled * self.logits_flops
        states = len(plan.num_scheduled) * self.state_bytes
        read = self.weight_bytes + keys * self.kv_bytes + states
        written = num_tokens * self.num_layers * self.kv_bytes + states
        return StepWork(flops, read, written, self.seconds(flops, read + written))

    def seconds(self, flops: float, num_bytes: float) -> float:
        """At the device's peaks; 0 where they aren't known."""
        if self.peak_flops is None or self.peak_bandwidth is None:
            return 0.0
        return max(flops / self.peak_flops, num_bytes / self.peak_bandwidth)

    def _seen_by_decodes(self, plan: StepPlan, num_rows: int) -> int:
        """Keys, over all layers, that rows with a token each see."""
        seen = 0
        for window, num_layers in self.windows:
            before_r = plan.num_computed
            if window is not None:
                before_r = np.minimum(before_r, window - 1)
            seen += num_layers * (int(before_r.sum()) + num_rows)
        return seen

    def _seen(self, plan: StepPlan) -> tuple[float, float]:
        """Over all layers, pairs of a token and a key that it sees, and keys that a row's tokens see together."""
        counts_r = plan.num_scheduled.astype(np.float64)
        ends_r = counts_r + plan.num_computed
        middles_r = ends_r - 0.5 * (counts_r - 1)
        pairs = keys = 0.0
        for window, num_layers in self.windows:
            limit = np.inf if window is None else window
            pairs += num_layers * float(counts_r @ np.minimum(middles_r, limit))
            keys += num_layers * float(np.minimum(ends_r, counts_r + (limit - 1)).sum())
        return pairs, keys
