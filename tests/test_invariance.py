"""The same tokens whoever shares the batch, whatever the chunks, the overlap, the mesh, and after a preemption.

float32, a tiny random model. The tokens of a request run alone are the reference; that those are right is what
`tests/models` shows against transformers.
"""

from __future__ import annotations

import numpy as np
import pytest

from jaxinfer.engine.stats import SchedulerStats
from jaxinfer.sampling_params import SamplingParams
from tests.core_harness import executor_of, run, tiny_core

pytestmark = pytest.mark.usefixtures("optimized_programs")
NUM_REQUESTS, NUM_TOKENS = 32, 24


def prompts(n: int = NUM_REQUESTS) -> list[list[int]]:
    rng = np.random.default_rng(5)
    return [rng.integers(3, 97, size=int(k)).tolist() for k in rng.integers(1, 64, size=n)]


def sampling(seeded: bool, i: int) -> SamplingParams:
    if seeded:
        return SamplingParams(
            temperature=0.9, top_p=0.95, seed=i, max_tokens=NUM_TOKENS, ignore_eos=True
        )
    return SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)


@pytest.fixture(scope="module")
def alone() -> dict[bool, list[list[int]]]:
    """Each request by itself, one engine, one after the other."""
    with tiny_core() as core:
        return {
            seeded: [
                run(core, [prompt], sampling(seeded, i))[0].token_ids
                for i, prompt in enumerate(prompts())
            ]
            for seeded in (False, True)
        }


@pytest.mark.parametrize(
    "args",
    [
        dict(max_num_batched_tokens=32, long_prefill_token_threshold=8),
        dict(max_num_batched_tokens=64, long_prefill_token_threshold=64),
        dict(max_num_batched_tokens=512, long_prefill_token_threshold=512),
        dict(async_scheduling=False),
        dict(tensor_parallel_size=2),
        dict(tensor_parallel_size=4),
    ],
    ids=["chunks of 8", "chunks of 64", "chunks of 512", "no overlap", "2 devices", "4 devices"],
)
def test_in_a_batch_of_32(alone, args):
    with tiny_core(**args) as core:
        for seeded in (False, True):
            params = [sampling(seeded, i) for i in range(NUM_REQUESTS)]
            assert [out.token_ids for out in run(core, prompts(), params)] == alone[seeded]


@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "no overlap"])
def test_after_preemption_with_blocks_for_two_of_eight(alone, overlap):
    with tiny_core(num_gpu_blocks_override=1 + 2 * 24, async_scheduling=overlap) as core:
        for seeded in (False, True):
            params = [sampling(seeded, i) for i in range(8)]
            stats: list[SchedulerStats] = []
            outs = run(core, prompts()[:8], params, stats=stats)
            assert sum(s.num_preemptions for s in stats) > 0
            assert [out.token_ids for out in outs] == alone[seeded][:8]


def test_nothing_compiles_after_a_full_warm_up():
    """Every kind of request, alone and together, with all of the ladder warm."""
    with tiny_core(
        warmup="all", max_num_seqs=4, max_num_batched_tokens=32, max_model_len=48
    ) as core:
        kinds = [
            SamplingParams(temperature=0.0, max_tokens=4),
            SamplingParams(temperature=0.7, top_k=5, max_tokens=9),
            SamplingParams(presence_penalty=0.5, logit_bias={5: 2.0}, max_tokens=5),
            SamplingParams(temperature=0.0, logprobs=3, prompt_logprobs=2, max_tokens=3),
            SamplingParams(min_tokens=3, stop_token_ids=[7], max_tokens=5),
            SamplingParams(allowed_token_ids=[5, 6, 7], max_tokens=4),
        ]
        assert executor_of(core).num_compilations == 0
        rng = np.random.default_rng(1)
        for params in kinds:
            run(core, [rng.integers(3, 97, size=int(n)).tolist() for n in (1, 5, 17, 30)], params)
        run(core, [rng.integers(3, 97, size=int(n)).tolist() for n in range(1, 25)], kinds * 4)
        assert executor_of(core).num_compilations == 0
