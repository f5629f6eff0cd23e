"""Engines over models whose layers keep states: what happens to a request's slot, against transformers."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import cache
from math import prod

import jax
import numpy as np
import pytest
import torch

from jaxinfer.engine.core import EngineCore
from jaxinfer.engine.messages import EngineCoreRequest
from jaxinfer.engine.stats import SchedulerStats
from jaxinfer.sampling_params import SamplingParams
from tests.core_harness import executor_of, run, tiny_core
from tests.models.architectures.entry import Entry, checkpoint, transformers_model
from tests.models.architectures.table import ENTRIES

MAX_LEN, BLOCK_SIZE, NUM_SEQS, BUDGET = 48, 4, 3, 8
SIZES = dict(
    max_model_len=MAX_LEN,
    block_size=BLOCK_SIZE,
    max_num_seqs=NUM_SEQS,
    max_num_batched_tokens=BUDGET,
    # For one request at full length and a half.
    num_gpu_blocks_override=1 + 3 * MAX_LEN // BLOCK_SIZE // 2,
)
NUM_NEW = 20
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_NEW, ignore_eos=True)


@pytest.fixture(scope="module", params=["mamba2", "bamba"])
def model(request: pytest.FixtureRequest) -> Entry:
    return ENTRIES[request.param]


@pytest.fixture(scope="module")
def core(model: Entry) -> Iterator[EngineCore]:
    with tiny_core(checkpoint(model), **SIZES) as core:
        yield core


def prompts_of(*lengths: int, seed: int = 0) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(3, 97, size=length).tolist() for length in lengths]


def check(model: Entry, prompts: list[list[int]], outputs: list[list[int]]) -> None:
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output == greedy(model, tuple(prompt))
        assert len(set(output)) > 4, "the model repeats itself: equal tokens would prove little"


@cache
def greedy(model: Entry, prompt: tuple[int, ...]) -> list[int]:
    tokens = list(prompt)
    for _ in range(NUM_NEW):
        with torch.no_grad():
            logits = transformers_model(model)(torch.tensor([tokens])).logits[0, -1]
        second, best = torch.sort(logits).values[-2:].tolist()
        assert best - second > 1e-4, "a near tie: this prompt is no test"
        tokens.append(int(logits.argmax()))
    return tokens[len(prompt) :]


def test_preempted_requests_start_over(core: EngineCore, model: Entry) -> None:
    """More requests than slots, and blocks for less than two: each takes slots that others left, twice over."""
    prompts = prompts_of(20, 3, 13, 26, 1)
    stats: list[SchedulerStats] = []
    results = run(core, prompts, GREEDY, stats=stats)
    assert sum(s.num_preemptions for s in stats) > 0
    assert max(s.num_running for s in stats) == NUM_SEQS
    check(model, prompts, [r.token_ids for r in results])


def test_slots_of_aborted_requests_are_taken_over(core: EngineCore, model: Entry) -> None:
    """One is aborted in the middle of its prompt, one while it decodes; steps of both are in flight."""
    long, short, *others = prompts_of(25, 2, 9, 17, seed=1)
    for name, prompt in (("short", short), ("long", long)):
        core.add_request(EngineCoreRequest(name, prompt, GREEDY, arrival_time=time.monotonic()))
    for _ in range(3):
        core.step()
    row = core.scheduler.requests["long"].row
    assert 0 < core.scheduler.table.num_computed[row] < len(long)
    core.abort_requests(["long", "short"])
    results = run(core, others, GREEDY)
    check(model, others, [r.token_ids for r in results])


def test_states_are_counted_before_blocks_are(core: EngineCore, model: Entry) -> None:
    programs = executor_of(core).runner.programs
    block_bytes = num_bytes(programs.decoder.kv_cache_shapes(1, BLOCK_SIZE))
    state_bytes = num_bytes(programs.decoder.kv_cache_shapes(0, BLOCK_SIZE, NUM_SEQS + 1))
    cache = executor_of(core).runner.kv_cache
    assert num_bytes(cache) == core.num_blocks * block_bytes + state_bytes
    args = SIZES | dict(num_gpu_blocks_override=None)
    with tiny_core(
        checkpoint(model), **args, kv_cache_memory_bytes=state_bytes + 20 * block_bytes + 1
    ) as other:
        # Where a block costs nothing there are as many as can be used.
        assert other.num_blocks == (20 if block_bytes else NUM_SEQS * MAX_LEN // BLOCK_SIZE + 1)


def num_bytes(arrays: object) -> int:
    return sum(prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(arrays))


def test_the_cache_is_updated_where_it_lies(core: EngineCore) -> None:
    programs = executor_of(core).runner.programs
    cache_bytes = num_bytes(programs.kv_cache_shapes())
    for shape in programs.ladder.all_shapes():
        memory = programs.lower_forward(shape).compile().memory_analysis()
        assert memory.alias_size_in_bytes == cache_bytes


def test_a_model_without_attention_needs_a_block_per_request() -> None:
    args = SIZES | dict(block_size=None, num_gpu_blocks_override=None)
    prompts = prompts_of(11, 5, 18, 2, seed=2)
    with tiny_core(checkpoint(ENTRIES["mamba"]), **args) as core:
        assert core.config.cache.block_size == MAX_LEN
        assert core.num_blocks == NUM_SEQS + 1
        results = run(core, prompts, GREEDY)
    check(ENTRIES["mamba"], prompts, [r.token_ids for r in results])


@pytest.mark.parametrize(
    "option",
    [
        {"enable_prefix_caching": True},
        {"deterministic": True},
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}},
    ],
    ids=lambda option: next(iter(option)),
)
def test_what_goes_back_to_earlier_tokens_is_refused(option: dict[str, object]) -> None:
    (name,) = option
    with (
        pytest.raises(ValueError, match=f"{name}=.* layers keep states"),
        tiny_core(checkpoint(ENTRIES["bamba"]), **option),
    ):
        pass
