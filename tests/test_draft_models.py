"""Speculation with models that draft, over the real executor: the tokens are those of an engine without it. float32, tiny
random models. What each drafter drafts is tested in `tests/executor`."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from scipy import stats as stats_

from jaxinfer.engine.core import EngineCore
from jaxinfer.engine.stats import SchedulerStats
from jaxinfer.sampling_params import SamplingParams
from tests.core_harness import executor_of, run, tiny_core
from tests.drafter_checkpoints import Eagle3Oracle, MedusaOracle, write
from tests.tiny_checkpoints import tiny_checkpoint, tiny_model

TARGET, VOCAB, DIM = "llama_biased", 97, 48
K = 3
STREAM_LAYERS = [0, 1, 2]
SIZES = dict(max_model_len=48, block_size=4, max_num_seqs=2, max_num_batched_tokens=8)
"""Few shapes, few programs."""
PRESSED = dict(num_gpu_blocks_override=17, long_prefill_token_threshold=6)
"""Blocks for a long request and a third, and prompts in chunks."""
LARGER = dict(max_num_seqs=4, max_num_batched_tokens=16, num_gpu_blocks_override=25)

type Request = tuple[list[int], SamplingParams]


@pytest.fixture(scope="module")
def drafters(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    directory = tmp_path_factory.mktemp("drafters")
    eagle3, medusa = Eagle3Oracle(VOCAB, DIM), MedusaOracle(VOCAB, DIM, heads=K)
    config = eagle3.config | dict(eagle_aux_hidden_state_layer_ids=STREAM_LAYERS)
    return {
        "draft_model": tiny_checkpoint("qwen3"),
        "eagle3": write(directory / "eagle3", config, eagle3.tensors),
        "medusa": write(directory / "medusa", medusa.config, medusa.tensors),
        "target": tiny_checkpoint(TARGET),
    }


def speculating(drafters: dict[str, Path], drafter: str, **config) -> dict:
    method = "draft_model" if drafter == "target" else drafter
    given = dict(method=method, model=str(drafters[drafter]), num_speculative_tokens=K)
    return dict(speculative_config=given | config)


def requests(number: int, *, prompts_of: int = 0, **params) -> list[Request]:
    """Half of them begin alike, so that they find each other's blocks."""
    rng = np.random.default_rng(prompts_of)
    shared = rng.integers(3, VOCAB, 20).tolist()
    made = []
    for i in range(number):
        own = rng.integers(3, VOCAB, int(rng.integers(1, 12))).tolist()
        prompt = shared[: int(rng.integers(1, 6)) * 4] + own if i % 2 else own
        max_tokens = int(rng.integers(1, 48 - len(prompt) + 1))
        options = dict(temperature=0.0, ignore_eos=True, max_tokens=max_tokens) | params
        made.append((prompt, SamplingParams(**options)))
    return made


def generate(
    core: EngineCore, mix: list[Request], stats: list[SchedulerStats] | None = None
) -> list[list[int]]:
    outs = run(core, [p for p, _ in mix], [params for _, params in mix], stats=stats)
    return [out.token_ids for out in outs]


def accepted_and_drafted(stats: list[SchedulerStats]) -> tuple[int, int]:
    counted = [s.spec_decode for s in stats if s.spec_decode is not None]
    accepted = sum(s.num_accepted_tokens for s in counted)
    return accepted, sum(s.num_draft_tokens for s in counted)


def seeded_requests() -> list[Request]:
    """Some with filters and penalties."""
    every = [
        requests(4, prompts_of=1, temperature=0.7, seed=5),
        requests(4, prompts_of=2, temperature=1.0, seed=6, top_k=9, top_p=0.8),
        requests(4, prompts_of=3, temperature=0.4, seed=7, repetition_penalty=1.3),
    ]
    return [request for some in every for request in some]


@pytest.fixture(scope="module")
def plain() -> tuple[list[list[int]], list[list[int]]]:
    """What an engine without speculation gives."""
    with tiny_core(TARGET, **SIZES) as core:
        return generate(core, requests(50)), generate(core, seeded_requests())


@pytest.mark.parametrize(
    ("drafter", "args"),
    [
        ("target", LARGER),
        ("draft_model", dict()),
        ("eagle3", dict()),
        ("medusa", dict()),
        ("target", dict(tensor_parallel_size=2)),
        ("eagle3", dict(tensor_parallel_size=2)),
    ],
    ids=["target", "draft_model", "eagle3", "medusa", "target-tp2", "eagle3-tp2"],
)
def test_tokens_are_those_without_speculation(drafters, plain, drafter: str, args: dict) -> None:
    stats: list[SchedulerStats] = []
    args = SIZES | PRESSED | args | speculating(drafters, drafter)
    with tiny_core(TARGET, **args) as core:
        assert generate(core, requests(50), stats) == plain[0]
        accepted, drafted = accepted_and_drafted(stats)
        assert drafted > 200
        # A target that drafts for itself is always right: after preemptions, cached prefixes, chunks, in mixed batches.
        assert accepted == drafted if drafter == "target" else accepted < drafted
        assert sum(s.num_preemptions for s in stats) > 3
        assert sum(s.prefix_cache_hits for s in stats) > 100
        if "tensor_parallel_size" in args:
            return
        stats.clear()
        assert generate(core, seeded_requests(), stats) == plain[1]
        assert accepted_and_drafted(stats)[1] > 50
        assert core.scheduler.kv.pool.usage == 0.0


def test_streams_of_the_target_reach_the_drafter(drafters) -> None:
    """An engine's EAGLE-3 drafts are those for the hidden states that transformers has."""
    import torch

    prompt, drafts = [5, 11, 60, 7, 23, 9], []
    with tiny_core(TARGET, **SIZES, **speculating(drafters, "eagle3")) as core:
        executor = executor_of(core)
        sample = executor.sample_tokens

        def sample_and_look(mask):
            handle = sample(mask)
            drafts.append(handle.result().draft_token_ids[0].tolist())
            return handle

        executor.sample_tokens = sample_and_look
        mix = [(prompt, SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True))]
        steps: list[SchedulerStats] = []
        (output,) = generate(core, mix, steps)
    model, oracle = tiny_model(TARGET), Eagle3Oracle(VOCAB, DIM)
    embed = model.get_input_embeddings().weight.detach().numpy()
    known = len(prompt)
    assert len(drafts) == len(steps)
    for found, step in zip(drafts, steps, strict=True):
        known += 1 + (step.spec_decode.num_accepted_tokens if step.spec_decode else 0)
        if known >= len(prompt) + len(output):
            break
        token_ids = (prompt + output)[:known]
        with torch.no_grad():
            states = model(torch.tensor([token_ids[:-1]]), output_hidden_states=True).hidden_states
        streams = np.concatenate([states[i][0].numpy() for i in STREAM_LAYERS], axis=1)
        assert found == oracle.drafts(token_ids, streams, embed, K)


@pytest.mark.parametrize("level", [1, 2])
def test_a_drafter_sleeps_with_its_target(drafters, plain, level: int) -> None:
    with tiny_core(TARGET, **SIZES, **PRESSED, **speculating(drafters, "target")) as core:
        core.sleep(level)
        assert all(leaf.is_deleted() for leaf in executor_of(core).runner.drafting.drafter.leaves)
        core.wake_up()
        stats: list[SchedulerStats] = []
        assert generate(core, requests(50)[:6], stats) == plain[0][:6]
        accepted, drafted = accepted_and_drafted(stats)
        assert accepted == drafted > 0


@pytest.mark.parametrize("drafter", ["draft_model", "medusa"])
def test_drawn_drafts_leave_the_distribution_as_it_is(drafters, drafter: str) -> None:
    """Against every possible output's probability, by transformers."""
    prompt, length, top_k, temperature = [5, 11, 60, 7, 23], 3, 4, 1.5
    params = SamplingParams(
        temperature=temperature, top_k=top_k, max_tokens=length, ignore_eos=True
    )
    exact = exact_outputs(prompt, length, top_k, temperature)
    stats: list[SchedulerStats] = []
    config = speculating(drafters, drafter, draft_sample_method="probabilistic")
    with tiny_core(TARGET, **(SIZES | LARGER), **config) as core:
        outputs = generate(core, [(prompt, params)] * NUM_DRAWN, stats)
    counts = Counter(map(tuple, outputs))
    assert counts.keys() <= exact.keys()
    observed = np.array([counts[output] for output in exact])
    expected = NUM_DRAWN * np.array(list(exact.values()))
    rare = expected < 8
    observed, expected = (np.append(x[~rare], x[rare].sum()) for x in (observed, expected))
    assert stats_.chisquare(observed, expected).pvalue > 1e-4
    accepted, drafted = accepted_and_drafted(stats)
    assert 0 < accepted < drafted


NUM_DRAWN = 1500


def exact_outputs(
    prompt: list[int], length: int, top_k: int, temperature: float
) -> dict[tuple[int, ...], float]:
    """All outputs and their probabilities."""
    import torch

    found = {(): 1.0}
    for _ in range(length):
        with torch.no_grad():
            contexts = torch.tensor([prompt + list(output) for output in found])
            logits = tiny_model(TARGET)(contexts).logits[:, -1].double().numpy() / temperature
        longer = {}
        for (output, probability), x in zip(found.items(), logits, strict=True):
            best = np.argsort(-x)[:top_k]
            weights = np.exp(x[best] - x[best].max())
            for token, p in zip(best.tolist(), weights / weights.sum(), strict=True):
                longer[*output, token] = probability * float(p)
        found = longer
    return found
