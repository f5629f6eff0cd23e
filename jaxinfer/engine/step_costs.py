"""What a step costs the device, estimated from the model's dimensions and the step's plan."""

from __future__ import annotations

from dataclasses import dataclass

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
    logits_flops: Per row that samples.
    pair_flops: Per layer, for one query token and one key that it sees.
    weight_bytes: Read in every step.
    kv_bytes: Keys and values of one token in one layer.
    windows: Layers by their attention window (None: all tokens), as (window, number of layers).
    peak_flops, peak_bandwidth: The device's, a second; None where they aren't known.
    """

    token_flops: float
    logits_flops: float
    pair_flops: float
    weight_bytes: float
    kv_bytes: float
    windows: tuple[tuple[int | None, int], ...]
    peak_flops: float | None = None
    peak_bandwidth: float | None = None

    def work(self, plan: StepPlan, num_tokens: int) -> StepWork:
        """`num_tokens` are the plan's, which whoever calls has counted. A token in the middle of its row's new ones
        stands for all of them where a window cuts off their contexts."""
        pairs = keys = 0.0
        if num_tokens == len(plan.num_scheduled):  # a token per row, as in most steps
            for window, num_layers in self.windows:
                seen_r = plan.num_computed
                if window is not None:
                    seen_r = np.minimum(seen_r, window - 1)
                keys += num_layers * (int(seen_r.sum()) + num_tokens)
            pairs = keys
        else:
            counts_r = plan.num_scheduled.astype(np.float64)
            ends_r = counts_r + plan.num_computed
            middles_r = ends_r - 0.5 * (counts_r - 1)
            for window, num_layers in self.windows:
                limit = np.inf if window is None else window
                pairs += num_layers * float(counts_r @ np.minimum(middles_r, limit))
                keys += num_layers * float(np.minimum(ends_r, counts_r + (limit - 1)).sum())
        num_sampled = float(np.count_nonzero(plan.samples))
        num_layers = sum(number for _, number in self.windows)
        flops = num_tokens * self.token_flops + num_sampled * self.logits_flops
        flops += pairs * self.pair_flops
        read = self.weight_bytes + keys * self.kv_bytes
        written = num_tokens * num_layers * self.kv_bytes
        seconds = 0.0
        if self.peak_flops is not None and self.peak_bandwidth is not None:
            seconds = max(flops / self.peak_flops, (read + written) / self.peak_bandwidth)
        return StepWork(flops, read, written, seconds)
