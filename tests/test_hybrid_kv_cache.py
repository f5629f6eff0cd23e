"""Models whose layers have windows: the tokens are transformers', however blocks are given back and found again.

float32, tiny random models whose windows are shorter than the prompts. What is freed and found when is tested in
`tests/engine`.
"""

from __future__ import annotations

from functools import cache
from math import prod
from pathlib import Path

import jax
import numpy as np
import pytest
import torch

from jaxinfer.engine.cache_demand import CacheDemand
from jaxinfer.engine.stats import SchedulerStats
from jaxinfer.engine_args import EngineArgs
from jaxinfer.models.cache_groups import CacheGroups, model_groups
from jaxinfer.models.functional import FunctionalDecoder
from jaxinfer.models.registry import describe_model
from jaxinfer.parallel.mesh import make_mesh
from jaxinfer.sampling_params import SamplingParams
from tests.core_harness import executor_of, run, tiny_core
from tests.tiny_checkpoints import tiny_model

BLOCK, MAX_LEN = 4, 48
SIZES = dict(
    max_model_len=MAX_LEN,
    block_size=BLOCK,
    max_num_seqs=4,
    max_num_batched_tokens=16,
)
WINDOWS = {"gemma3": (None, 5, 5), "mistral": (7,)}
NUM_BLOCKS = {"gemma3": 27, "mistral": 9}
"""Just enough for one request at its longest."""
NGRAM = dict(method="ngram", num_speculative_tokens=3, prompt_lookup_min=1, prompt_lookup_max=2)
NUM_TOKENS = 8
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)


@cache
def prompts() -> list[list[int]]:
    """Of one to eight windows, that begin like one of three texts, each of them twice in a row."""
    rng = np.random.default_rng(1)
    texts = [rng.integers(3, 97, size=MAX_LEN).tolist() for _ in range(3)]
    cut = [
        texts[i % 3][: int(rng.integers(*length))] + rng.integers(3, 97, size=i % 3).tolist()
        for i, length in enumerate([(4, 8)] * 5 + [(10, 34)] * 5)
    ]
    # A piece over and over is what n-grams can guess.
    cut += [(texts[i][: 5 + i] * 9)[: 30 + i] for i in range(3)]
    return [prompt for prompt in cut for _ in range(2)]


@cache
def expected(checkpoint: str) -> list[list[int]]:
    model, tokens = tiny_model(checkpoint), []
    for prompt in prompts():
        ids = list(prompt)
        for _ in range(NUM_TOKENS):
            with torch.no_grad():
                logits = model(torch.tensor([ids])).logits[0, -1]
            second, best = logits.sort().values[-2:]
            assert best - second > 1e-4, "a near tie: this prompt is no test"
            ids.append(int(logits.argmax()))
        tokens.append(ids[len(prompt) :])
    return tokens


@pytest.mark.parametrize(
    ("checkpoint", "args"),
    [
        ("gemma3", dict()),
        (
            "gemma3",
            dict(
                enable_prefix_caching=False, async_scheduling=False, long_prefill_token_threshold=7
            ),
        ),
        ("gemma3", dict(speculative_config=NGRAM, tensor_parallel_size=2)),
        ("gemma3", dict(deterministic=True)),
        ("mistral", dict(speculative_config=NGRAM)),
    ],
    ids=["overlap", "no cache, chunks", "n-grams, two devices", "deterministic", "one group"],
)
def test_tokens_are_those_of_transformers(checkpoint, args) -> None:
    stats: list[SchedulerStats] = []
    blocks = NUM_BLOCKS[checkpoint]
    with tiny_core(checkpoint, num_gpu_blocks_override=blocks, **SIZES, **args) as core:
        assert core.config.cache.windows == WINDOWS[checkpoint]
        # In groups layers share their arrays.
        assert len(executor_of(core).runner.kv_cache) == (1 if checkpoint == "gemma3" else 3)
        outputs = run(core, prompts(), GREEDY, stats=stats)
        assert [out.token_ids for out in outputs] == expected(checkpoint)
        assert core.scheduler.kv.pool.usage == 0.0
    hits = sum(s.prefix_cache_hits for s in stats)
    assert hits > 0 if args.get("enable_prefix_caching", True) else hits == 0
    assert sum(s.num_preemptions for s in stats) > 0
    drafts = [s.spec_decode for s in stats if s.spec_decode is not None]
    assert ("speculative_config" in args) == (sum(d.num_accepted_tokens for d in drafts) > 0)


GEMMA_3_270M = dict(
    architectures=["Gemma3ForCausalLM"],
    vocab_size=262_144,
    hidden_size=640,
    intermediate_size=2048,
    num_hidden_layers=18,
    num_attention_heads=4,
    num_key_value_heads=1,
    max_position_embeddings=32_768,
    sliding_window=512,
    dtype="bfloat16",
)


@pytest.mark.parametrize("length", [1024, 2048, 4096, 8192, 32768])
def test_the_page_says_how_many_requests_fit(length: int) -> None:
    model, cells = describe_model(GEMMA_3_270M, length), []
    for device, memory in (("gpu", 8 << 30), ("cpu", 1 << 30)):
        rooms = []
        for disabled in (True, False):
            args = EngineArgs("m", max_model_len=length, disable_hybrid_kv_cache_manager=disabled)
            config = args.create_engine_config(model, device)
            groups = CacheGroups.single(18) if disabled else model_groups(model.spec, length)
            decoder = FunctionalDecoder.create(model.spec, make_mesh(), "bfloat16", groups=groups)
            arrays = jax.tree.leaves(decoder.kv_cache_shapes(1, config.cache.block_size))
            assert len(groups) == len(config.cache.windows) and len(arrays) == 2 * groups.size
            num_blocks = memory // sum(2 * prod(array.shape) for array in arrays)
            demand = CacheDemand.of(config)
            rooms.append(demand.num_requests(num_blocks - 1, config.max_blocks_per_seq))
        cells += [f"{rooms[0]:.1f}", f"{rooms[1]:.1f}", f"{rooms[1] / rooms[0]:.1f} ×"]
    page = (Path(__file__).parents[1] / "docs" / "hybrid_kv_cache.md").read_text()
    assert f"| {length:,} | {' | '.join(cells)} |" in page
