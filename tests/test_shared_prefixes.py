"""Attending to a shared beginning once, over the real executor: the tokens are those of an engine that never does.

float32, tiny random models. Which rows share what is tested in `tests/engine`, the arithmetic in `tests/kernels_pallas`.
"""

from __future__ import annotations

import numpy as np
import pytest

from jaxinfer.engine.core import EngineCore
from jaxinfer.engine.plan import StepPlan
from jaxinfer.engine.stats import SchedulerStats
from jaxinfer.sampling_params import SamplingParams
from tests.core_harness import Generated, executor_of, run, tiny_core

SIZES = dict(
    max_model_len=48, block_size=4, max_num_seqs=8, max_num_batched_tokens=16, max_logprobs=2
)
"""They need few programs."""
CASCADE = dict(cascade_min_rows=3, cascade_min_tokens=8)

type Request = tuple[list[int], SamplingParams]


def requests(seed: int, count: int) -> list[Request]:
    """Two texts that the prompts begin with, some of them farther than others, and a few that begin with neither."""
    rng = np.random.default_rng(seed)
    texts = rng.integers(3, 97, size=(2, 30)).tolist()
    made = []
    for i in range(count):
        own = rng.integers(3, 97, size=rng.integers(1, 6)).tolist()
        length = int(rng.choice([0, 8, 16, 16, 17, 24, 30]))
        greedy = SamplingParams(
            temperature=0.0, max_tokens=int(rng.integers(4, 13)), ignore_eos=True
        )
        made.append((texts[i % 3 % 2][:length] + own, greedy))
    return made


def count_grouped(core: EngineCore) -> list[int]:
    """A list that gets the number of groups of every step."""
    executor, counts = executor_of(core), []
    execute = executor.execute_model

    def counting(plan: StepPlan) -> None:
        counts.append(0 if plan.prefix_groups is None else len(plan.prefix_groups.num_rows))
        execute(plan)

    executor.execute_model = counting  # type: ignore[method-assign]
    return counts


def generate(
    core: EngineCore, mix: list[Request], stats: list[SchedulerStats] | None = None
) -> list[Generated]:
    return run(core, [prompt for prompt, _ in mix], [p for _, p in mix], stats=stats)


@pytest.mark.parametrize(
    ("checkpoint", "args"),
    [
        ("gemma3", dict(async_scheduling=False, num_gpu_blocks_override=62)),
        ("llama", dict(tensor_parallel_size=2)),
    ],
    ids=["layers with windows, preemption", "2 devices"],
)
def test_the_tokens_are_the_same(checkpoint, args):
    mixes = [requests(seed, 20) for seed in range(3)]
    with tiny_core(checkpoint, disable_cascade_attn=True, **SIZES) as core:
        counts = count_grouped(core)
        expected = [[out.token_ids for out in generate(core, mix)] for mix in mixes]
        assert not any(counts)
    stats: list[SchedulerStats] = []
    with tiny_core(checkpoint, **SIZES, **CASCADE, **args) as core:
        counts = count_grouped(core)
        for mix, tokens in zip(mixes, expected, strict=True):
            assert [out.token_ids for out in generate(core, mix, stats)] == tokens
    preempts = "num_gpu_blocks_override" in args
    assert preempts == (sum(s.num_preemptions for s in stats) > 0)
    assert sum(count > 0 for count in counts) > len(counts) / 6
    assert max(counts) == 2 or preempts


def test_each_request_gets_its_own_logprobs_and_randomness():
    """Rows change their places when a group forms; what belongs to a row goes with it."""
    rng = np.random.default_rng(2)
    text = rng.integers(3, 97, size=16).tolist()
    mix = []
    for i in range(8):
        params = SamplingParams(
            temperature=0.8,
            seed=i,
            max_tokens=6 + i % 3,
            logprobs=i % 3 or None,
            presence_penalty=0.5 * (i % 2),
            ignore_eos=True,
        )
        mix.append((text[: 16 * (i % 4 > 0)] + rng.integers(3, 97, size=3).tolist(), params))
    with tiny_core(disable_cascade_attn=True, **SIZES) as core:
        expected = generate(core, mix)
    with tiny_core(**SIZES, **CASCADE) as core:
        counts = count_grouped(core)
        got = generate(core, mix)
    assert max(counts) == 1
    for ours, theirs in zip(got, expected, strict=True):
        assert ours.token_ids == theirs.token_ids
        for a, b in zip(ours.logprobs, theirs.logprobs, strict=True):
            assert a.token_ids == b.token_ids
            np.testing.assert_allclose(a.logprobs, b.logprobs, atol=1e-4)


def test_nothing_compiles_after_a_full_warm_up():
    with tiny_core(warmup="all", **SIZES, **CASCADE) as core:
        counts = count_grouped(core)
        for seed in range(3):
            generate(core, requests(seed, 12))
        assert any(counts)
        assert executor_of(core).num_compilations == 0
