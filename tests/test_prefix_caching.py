"""Prefix caching over the real executor: the tokens are those of an engine without it.

float32, a tiny random model. What is found and when is tested in `tests/engine`.
"""

from __future__ import annotations

import numpy as np
import pytest

from jaxinfer.engine.core import EngineCore
from jaxinfer.engine.stats import SchedulerStats
from jaxinfer.sampling_params import SamplingParams
from tests.core_harness import Generated, run, tiny_core

BLOCK = 4
NUM_MIXES = 500
MAX_LEN = 48
SIZES = dict(max_model_len=MAX_LEN, block_size=BLOCK)

type Request = tuple[list[int], SamplingParams]


def greedy(max_tokens: int) -> SamplingParams:
    """Thousands of seeded draws would hold one so near the edge between two tokens that it falls to either side with
    the rounding of another batch, cached or not."""
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)


def random_mixes() -> list[list[Request]]:
    """Prompts that begin like one of six texts, up to one below, at, or one above a multiple of the block size, and
    end there or go on by themselves."""
    rng = np.random.default_rng(0)
    texts = [rng.integers(3, 97, size=MAX_LEN).tolist() for _ in range(6)]
    mixes = []
    for _ in range(NUM_MIXES):
        mix = []
        for _ in range(rng.integers(2, 6)):
            length = int(rng.integers(1, 8)) * BLOCK + int(rng.integers(-1, 2))
            own = rng.integers(3, 97, size=rng.choice([0, 0, 1, 3, 4, 5])).tolist()
            prompt = texts[rng.integers(6)][:length] + own
            mix.append((prompt, greedy(int(rng.integers(1, 11)))))
        mixes.append(mix)
    return mixes


def generate(
    core: EngineCore, mix: list[Request], stats: list[SchedulerStats] | None = None
) -> list[list[int]]:
    outs = run(core, [prompt for prompt, _ in mix], [p for _, p in mix], stats=stats)
    return [out.token_ids for out in outs]


@pytest.fixture(scope="module")
def expected() -> list[list[list[int]]]:
    mixes = random_mixes()
    with tiny_core(enable_prefix_caching=False, **SIZES) as core:
        tokens = iter(generate(core, [request for mix in mixes for request in mix]))
    return [[next(tokens) for _ in mix] for mix in mixes]


@pytest.mark.parametrize(
    "args",
    [
        dict(),
        dict(
            async_scheduling=False,
            long_prefill_token_threshold=6,
            prefix_caching_hash_algo="xxhash",
        ),
    ],
    ids=["overlap", "chunks-no-overlap"],
)
def test_500_mixes_of_shared_prefixes_with_eviction_and_preemption(expected, args) -> None:
    stats: list[SchedulerStats] = []
    with tiny_core(num_gpu_blocks_override=17, max_num_seqs=4, **SIZES, **args) as core:
        for mix, tokens in zip(random_mixes(), expected, strict=True):
            assert generate(core, mix, stats) == tokens
        assert core.scheduler.kv.pool.usage == 0.0
    assert sum(s.num_preemptions for s in stats) > 50
    queries = sum(s.prefix_cache_queries for s in stats)
    hits = sum(s.prefix_cache_hits for s in stats)
    # Six texts of twelve blocks don't fit into sixteen blocks: some is found, some was evicted.
    assert 0.2 < hits / queries < 0.9


def test_requests_that_arrive_together_share_within_one_step() -> None:
    """All logits come from keys and values that another row of the same step wrote."""
    rng = np.random.default_rng(4)
    prefix = rng.integers(3, 97, size=24).tolist()
    seeded = SamplingParams(temperature=0.9, seed=7, max_tokens=8, ignore_eos=True)
    mix = [
        (prefix + rng.integers(3, 97, size=3).tolist(), seeded if i % 2 else greedy(8))
        for i in range(8)
    ]
    stats: list[SchedulerStats] = []
    with tiny_core(enable_prefix_caching=False, **SIZES) as core:
        expected = generate(core, mix)
    with tiny_core(**SIZES) as core:
        assert generate(core, mix, stats) == expected
    assert stats[0].num_scheduled_tokens == 24 + 8 * 3


def test_penalties_and_prompt_logprobs_know_the_whole_prompt() -> None:
    """Of a prompt that is found in the cache, the sampler sees every token all the same."""
    rng = np.random.default_rng(5)
    prompt = rng.integers(3, 97, size=25).tolist()
    penalized = SamplingParams(
        temperature=0.0,
        repetition_penalty=1.8,
        presence_penalty=0.5,
        max_tokens=12,
        ignore_eos=True,
    )
    scored = SamplingParams(temperature=0.0, prompt_logprobs=2, logprobs=2, max_tokens=3)

    def outputs(core: EngineCore) -> list[Generated]:
        return [run(core, [prompt], p)[0] for p in (penalized, penalized, scored)]

    with tiny_core(enable_prefix_caching=False, **SIZES) as core:
        expected = outputs(core)
    with tiny_core(**SIZES) as core:
        got = outputs(core)
    assert [g.token_ids for g in got] == [e.token_ids for e in expected]
    ours, theirs = got[2].prompt_logprobs, expected[2].prompt_logprobs
    assert len(ours) == len(theirs) == len(prompt) - 1
    for a, b in zip(ours, theirs, strict=True):
        assert a.token_ids == b.token_ids
        np.testing.assert_allclose(a.logprobs, b.logprobs, atol=1e-5)
