"""A model with latent attention and a mixture in the engine: the tokens are transformers', the cache holds latents.

float32, a tiny random DeepSeek-V3.
"""

from __future__ import annotations

from functools import cache

import jax
import numpy as np
import pytest

from jaxinfer.sampling_params import SamplingParams
from tests.core_harness import executor_of, run, tiny_core
from tests.models.architectures.entry import checkpoint
from tests.models.architectures.oracle import transformers_logits
from tests.models.architectures.table import ENTRIES

MODEL = ENTRIES["deepseek_v3"]
BLOCK, MAX_LEN = 4, 48
LATENT, NUM_LAYERS = 24 + 8, 3
SIZES = dict(
    max_model_len=MAX_LEN,
    block_size=BLOCK,
    max_num_seqs=4,
    max_num_batched_tokens=16,
    num_gpu_blocks_override=17,
)
NUM_TOKENS = 8
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)


@cache
def prompts() -> list[list[int]]:
    """Two texts' beginnings of several lengths, each twice."""
    rng = np.random.default_rng(1)
    texts = [rng.integers(3, 97, size=MAX_LEN).tolist() for _ in range(2)]
    return [texts[i % 2][:length] for i, length in enumerate((5, 30, 17, 9, 30, 17, 5, 9))]


@cache
def expected() -> list[list[int]]:
    tokens = []
    for prompt in prompts():
        ids = list(prompt)
        for _ in range(NUM_TOKENS):
            logits = transformers_logits(MODEL, ids)[-1]
            second, best = np.sort(logits)[-2:]
            assert best - second > 1e-4, "a near tie: this prompt is no test"
            ids.append(int(logits.argmax()))
        tokens.append(ids[len(prompt) :])
    return tokens


@pytest.mark.parametrize(
    "args",
    [
        dict(),
        dict(tensor_parallel_size=2, enable_expert_parallel=True, async_scheduling=False),
    ],
    ids=["overlap", "two-devices"],
)
def test_tokens_are_those_of_transformers(args) -> None:
    stats = []
    with tiny_core(checkpoint(MODEL), **SIZES, **args) as core:
        pages = executor_of(core).runner.kv_cache
        assert [array.shape for array in jax.tree.leaves(pages)] == [
            (SIZES["num_gpu_blocks_override"], BLOCK, LATENT)
        ] * NUM_LAYERS
        costs = executor_of(core).step_costs
        assert costs.kv_bytes == LATENT * 4
        devices = args.get("tensor_parallel_size", 1)
        assert costs.pair_flops * devices == 2 * MODEL.config["num_attention_heads"] * (LATENT + 24)
        outputs = run(core, prompts(), GREEDY, stats=stats)
    assert [out.token_ids for out in outputs] == expected()
    assert sum(s.prefix_cache_hits for s in stats) > 0
    assert sum(s.num_preemptions for s in stats) > 0


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (dict(kv_cache_dtype="int8"), "kv_cache_dtype 'int8' is not supported for a cache of"),
        (dict(deterministic=True), "deterministic=True is not supported for latent attention"),
    ],
)
def test_what_latents_do_not_have_is_refused(args, message: str) -> None:
    with pytest.raises(ValueError, match=message), tiny_core(checkpoint(MODEL), **SIZES, **args):
        pass


def test_a_deterministic_engine_takes_mixtures() -> None:
    prompt = prompts()[1]
    alone, together = (
        _mixture_outputs(batch) for batch in ([prompt], [prompts()[2], prompt, prompts()[0]])
    )
    assert alone[0] == together[1]


def _mixture_outputs(batch: list[list[int]]) -> list[tuple[list[int], list[float]]]:
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=0)
    model = checkpoint(ENTRIES["qwen2_moe"])
    with tiny_core(model, **SIZES, deterministic=True) as core:
        return [(out.token_ids, out.logprobs) for out in run(core, batch, params)]
