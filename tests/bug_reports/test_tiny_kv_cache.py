"""Four long greedy requests and blocks for two: tokens equal an unpreempted run, and none is cut short."""

from __future__ import annotations

import numpy as np
import pytest

from jaxinfer.engine.stats import SchedulerStats
from jaxinfer.sampling_params import SamplingParams
from tests.core_harness import run, tiny_core


@pytest.mark.parametrize("enable_prefix_caching", [True, False])
def test_blocks_for_two_of_four_long_requests(enable_prefix_caching: bool) -> None:
    rng = np.random.default_rng(0)
    prompts = [rng.integers(3, 97, size=30).tolist() for _ in range(4)]
    params = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
    with tiny_core() as core:
        expected = run(core, prompts, params)
        assert core.scheduler.kv.pool.num_free == 599
    stats: list[SchedulerStats] = []
    two = 2 * 96 // 4
    with tiny_core(
        num_gpu_blocks_override=1 + two, enable_prefix_caching=enable_prefix_caching
    ) as core:
        got = run(core, prompts, params, stats=stats)
    assert sum(s.num_preemptions for s in stats) > 0
    assert [g.token_ids for g in got] == [e.token_ids for e in expected]
    assert all(len(g.token_ids) == 60 and str(g.finished.reason) == "length" for g in got)
