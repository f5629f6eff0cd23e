"""Work of plans against sums over every token and key."""

from __future__ import annotations

import itertools

import msgspec
import numpy as np
import pytest

from jaxinfer.engine.plan import StepPlan
from jaxinfer.engine.step_costs import StepCosts
from jaxinfer.engine.work_meter import WorkMeter
from tests.engine.core_runs import make_core, run
from tests.engine.fake_requests import make_request


def plan(scheduled, computed, samples):
    empty = np.zeros(0, np.int32)
    return StepPlan(
        admitted=[],
        rows=np.arange(len(scheduled), dtype=np.int32),
        num_scheduled=np.array(scheduled, np.int32),
        num_computed=np.array(computed, np.int32),
        samples=np.array(samples),
        block_rows=empty,
        block_cols=empty,
        block_ids=empty,
    )


COSTS = dict(token_flops=7.0, logits_flops=5.0, pair_flops=3.0, weight_bytes=1e4, kv_bytes=2.0)


def brute(costs, plan):
    flops, read, written = 0.0, costs.weight_bytes, 0.0
    for count, computed, samples in zip(
        plan.num_scheduled.tolist(), plan.num_computed.tolist(), plan.samples, strict=True
    ):
        flops += costs.token_flops * count + (costs.logits_flops if samples else 0)
        for window, num_layers in costs.windows:
            for _ in range(num_layers):
                seen = set()
                for position in range(computed, computed + count):
                    first = 0 if window is None else max(0, position - window + 1)
                    keys = range(first, position + 1)
                    flops += costs.pair_flops * len(keys)
                    seen.update(keys)
                read += costs.kv_bytes * len(seen)
                written += costs.kv_bytes * count
    return flops, read, written


@pytest.mark.parametrize("windows", [((None, 3),), ((4, 2), (None, 1)), ((1, 1),)])
def test_decodes_and_chunks_within_or_beyond_a_window(windows):
    """Exact but for chunks that a window begins to cut off in their middle."""
    costs = StepCosts(**COSTS, windows=windows)
    for given in (
        plan([1, 1, 1], [9, 0, 3], [True, True, False]),
        plan([1, 6], [5, 8], [True, False]),
    ):
        work = costs.work(given, given.num_tokens)
        assert (work.flops, work.read_bytes, work.write_bytes) == pytest.approx(brute(costs, given))
        assert work.roofline_seconds == 0


def test_counts_beyond_32_bits():
    costs = StepCosts(**COSTS, windows=((None, 1),))
    work = costs.work(plan([8192] * 4, [1_000_000] * 4, [False] * 4), 4 * 8192)
    pairs = 4 * sum(range(1_000_001, 1_008_193))
    assert work.flops == pytest.approx(3 * pairs + 7 * 4 * 8192)
    work = costs.work(plan([1] * 5000, [1_000_000] * 5000, [False] * 5000), 5000)
    assert work.flops == 3 * 5000 * 1_000_001 + 7 * 5000


def test_the_roofline_is_the_slower_of_both():
    slow_math = StepCosts(**COSTS, windows=((None, 1),), peak_flops=10.0, peak_bandwidth=1e9)
    slow_memory = StepCosts(**COSTS, windows=((None, 1),), peak_flops=1e9, peak_bandwidth=10.0)
    given = plan([2], [3], [True])
    flops, read, written = brute(slow_math, given)
    assert slow_math.work(given, 2).roofline_seconds == pytest.approx(flops / 10)
    assert slow_memory.work(given, 2).roofline_seconds == pytest.approx((read + written) / 10)


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("windows", [((None, 2),), ((6, 1), (None, 1))])
def test_every_step_reports_its_own_work(overlap, windows):
    """Requests come and go, so that batches go on decoding, change, and mix with prompts."""
    core, executor = make_core(overlap=overlap, num_blocks=20)
    costs = StepCosts(**COSTS, windows=windows, peak_flops=1e5, peak_bandwidth=1e4)
    core._work = WorkMeter(costs)
    sizes = [(9, 14), (3, 7), (20, 4), (2, 11), (5, 5), (1, 9), (17, 3)]
    requests = [make_request(f"{i}", n, max_tokens=m) for i, (n, m) in enumerate(sizes)]
    found = run(core, requests)
    reported = [outputs.stats for outputs in found.outputs if outputs.stats is not None]
    plans = executor.plans
    repeated = [a.rows is b.rows for a, b in itertools.pairwise(plans)]
    assert len(reported) == len(plans) and 3 < sum(repeated) < len(plans) - 3
    for stats, given in zip(reported, plans, strict=True):
        expected = costs.work(given, given.num_tokens)
        assert msgspec.to_builtins(stats.work) == pytest.approx(msgspec.to_builtins(expected))
    assert all(stats.seconds.wait >= 0 and stats.seconds.update > 0 for stats in reported)
    assert sum(stats.seconds.schedule for stats in reported) > 0
    assert reported[0].memory is not None and reported[1].memory is None
