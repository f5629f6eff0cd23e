"""A request's bits (logits, logprobs, tokens) with `deterministic=True`: alone, and among others in every way there is.

Requests run alone, one after the other with nothing in the prefix cache, are the reference. Then they run at once, in
another order, with blocks for few of them: steps mix decodes with chunks of prompts, beginnings are found in the cache,
and requests are preempted.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from jaxinfer.engine.core import EngineCore
from jaxinfer.engine.stats import SchedulerStats
from jaxinfer.sampling_params import SamplingParams
from tests.core_harness import Generated, executor_of, run, tiny_core

pytestmark = pytest.mark.usefixtures("optimized_programs")
VOCAB = 97
BLOCKS = 1 + 3 * 24
"""For three of the eight requests that run at once, at their longest, of layers without a window."""
FEW_BLOCKS = {"llama": 1 + 26, "qwen2": 1 + 38, "gemma3": 1 + 42, "qwen3": 1 + 48}
"""For one request at its longest, or a few short ones. With windows there are three groups of layers, each with blocks of
its own."""

Request = tuple[list[int], SamplingParams]


def requests(n: int) -> list[Request]:
    """Prompts of 1 to 60 tokens, half of them with one of four beginnings, and every variant of the sampler."""
    rng = np.random.default_rng(11)
    beginnings = rng.integers(3, VOCAB, size=(4, 40)).tolist()
    made = []
    for i in range(n):
        prompt = rng.integers(3, VOCAB, size=int(rng.integers(1, 56))).tolist()
        if i % 2:
            prompt = (beginnings[i % 4][: int(rng.integers(1, 41))] + prompt)[:60]
        kinds = (
            dict(temperature=0.0, logprobs=VOCAB),
            dict(temperature=1.5, seed=i, logprobs=VOCAB),
            dict(temperature=0.0, min_tokens=2, prompt_logprobs=5),
            dict(temperature=1.2, top_p=0.9, top_k=20, min_p=0.01, seed=i),
            dict(temperature=1.0, seed=i, presence_penalty=0.4, logit_bias={5: 1.0}, logprobs=3),
        )
        # Long outputs are what blocks run out for.
        length = int(rng.integers(2, 7)) if i % 7 else 30
        made.append((prompt, SamplingParams(max_tokens=length, ignore_eos=True, **kinds[i % 5])))
    return made


def bits(result: Generated) -> tuple[list[int], bytes, bytes]:
    def of(scores: list) -> bytes:
        return b"".join(
            np.array(score.token_ids, np.int32).tobytes()
            + np.array(score.logprobs, np.float32).tobytes()
            for score in scores
        )

    return result.token_ids, of(result.logprobs), of(result.prompt_logprobs)


def engine(checkpoint: str, dtype: str, **args):
    defaults = dict(
        deterministic=True,
        dtype=dtype,
        max_num_seqs=8,
        num_gpu_blocks_override=BLOCKS,
        max_logprobs=VOCAB,
        logprobs_mode="raw_logits",
    )
    return tiny_core(checkpoint, **(defaults | args))


def alone(core: EngineCore, work: Sequence[Request]) -> list[tuple]:
    results = []
    for prompt, params in work:
        core.reset_prefix_cache()
        results.append(bits(run(core, [prompt], params)[0]))
    return results


def together(core: EngineCore, work: Sequence[Request], seed: int) -> list[tuple]:
    """At once in a shuffled order, results in the given one. Asserts that all happens that should."""
    core.reset_prefix_cache()
    order = np.random.default_rng(seed).permutation(len(work)).tolist()
    stats: list[SchedulerStats] = []
    outs = run(
        core, [work[i][0] for i in order], [work[i][1] for i in order], stats=stats, max_steps=20000
    )
    assert sum(s.num_preemptions for s in stats) > 0
    assert sum(s.prefix_cache_hits for s in stats) > 0
    results = dict(zip(order, map(bits, outs), strict=True))
    return [results[i] for i in range(len(work))]


@pytest.mark.parametrize(
    ("dtype", "checkpoint"), [("bfloat16", "llama"), ("float32", "qwen2")], ids=lambda x: x
)
def test_300_requests_have_the_bits_of_each_run_alone(dtype, checkpoint):
    work = requests(300)
    with engine(checkpoint, dtype) as core:
        expected = alone(core, work)
    for seed, (budget, blocks) in enumerate(
        ((8, FEW_BLOCKS[checkpoint]), (64, BLOCKS), (512, BLOCKS))
    ):
        args = dict(max_num_batched_tokens=budget, num_gpu_blocks_override=blocks)
        with engine(checkpoint, dtype, **args) as core:
            assert together(core, work, seed) == expected, f"{budget=}"


@pytest.mark.parametrize(
    ("checkpoint", "args"),
    [
        ("gemma3", dict(dtype="bfloat16", tensor_parallel_size=2)),
        ("llama", dict(dtype="bfloat16", kv_cache_dtype="fp8")),
        ("qwen3", dict(dtype="float16", kv_cache_dtype="int8", async_scheduling=False)),
    ],
    ids=["two devices, windows, soft cap", "float8 cache", "int8 cache, float16, no overlap"],
)
def test_with_other_features(checkpoint, args):
    work = requests(30)
    limits = dict(max_num_batched_tokens=24, num_gpu_blocks_override=FEW_BLOCKS[checkpoint])
    with engine(checkpoint, **limits, **args) as core:
        expected = alone(core, work)
        assert together(core, work, 1) == expected


@pytest.mark.parametrize(
    ("dtype", "checkpoint"), [("bfloat16", "llama"), ("float32", "qwen2")], ids=lambda x: x
)
def test_scoring_a_text_gives_the_logprobs_that_it_was_sampled_with(dtype, checkpoint):
    """What reinforcement learning compares: outputs' logprobs, and those of the same tokens as a prompt."""
    num_tokens = 12
    with engine(checkpoint, dtype, logprobs_mode="raw_logprobs") as core:
        prompts = [prompt for prompt, _ in requests(12)]
        sampling = [
            SamplingParams(
                temperature=1.0, seed=i, max_tokens=num_tokens, ignore_eos=True, logprobs=5
            )
            for i in range(len(prompts))
        ]
        sampled = run(core, prompts, sampling)
        texts = [prompt + result.token_ids for prompt, result in zip(prompts, sampled, strict=True)]
        scored = run(core, texts, SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=5))
    for one, other in zip(sampled, scored, strict=True):
        expected = [score.logprobs for score in one.logprobs]
        assert [score.logprobs for score in other.prompt_logprobs[-num_tokens:]] == expected


def test_a_full_warm_up_compiles_everything_and_mixed_requests_need_nothing_else():
    with engine("llama", "bfloat16", warmup="all") as core:
        run(core, *map(list, zip(*requests(10), strict=True)))
        assert executor_of(core).num_compilations == 0
