"""The same tokens with speculation and without: greedy and seeded, whatever is drafted, and whatever else a request asks.

float32, a tiny random model; the plain engine is the reference.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer import LLM, RowState, SamplingParams, StructuredOutputsParams
from jaxinfer.engine.core import EngineCore
from jaxinfer.engine.plan import Int32
from jaxinfer.engine.stats import SchedulerStats
from tests.core_harness import Generated, executor_of, run, tiny_core
from tests.tiny_llm import SMALL, TOKENIZER, tiny_llm_dir

NUM_PROMPTS = int(os.environ.get("SPECULATION_PROMPTS", "200"))
NUM_TOKENS = 14
ENGINE = dict(max_num_seqs=8, max_num_batched_tokens=64, max_model_len=64)
NGRAM = dict(method="ngram", num_speculative_tokens=3, prompt_lookup_min=1, prompt_lookup_max=3)


def repetitive_prompts() -> list[list[int]]:
    """Pieces of random tokens, over and over: some n-gram has nearly always stood there before."""
    rng = np.random.default_rng(5)
    prompts = []
    for length in rng.integers(2, 40, size=NUM_PROMPTS):
        piece = rng.integers(3, 97, size=int(rng.integers(1, 9))).tolist()
        prompts.append((piece * 40)[: int(length)])
    return prompts


def parameters() -> list[SamplingParams]:
    """Half greedy, a quarter seeded, a quarter with everything that sampling has to offer."""
    kinds: list[dict] = [
        dict(repetition_penalty=1.3, presence_penalty=0.5),
        dict(frequency_penalty=0.4, logprobs=2, temperature=0.0),
        dict(logit_bias={5: 3.0, 7: -2.0}, logprobs=0),
        dict(min_tokens=6, stop_token_ids=list(range(3, 60))),
        dict(bad_words_token_ids=[[i, i] for i in range(3, 97)] + [[i] for i in range(3, 40)]),
        dict(allowed_token_ids=list(range(20, 30)), logprobs=3, temperature=0.0),
        dict(stop_token_ids=list(range(3, 20)), frequency_penalty=-0.5),
        dict(prompt_logprobs=1, top_k=5),
    ]
    params = []
    for i in range(NUM_PROMPTS):
        common: dict = dict(max_tokens=NUM_TOKENS, ignore_eos=True, seed=i)
        if i < NUM_PROMPTS // 2:
            common |= dict(temperature=0.0)
        elif i < NUM_PROMPTS * 3 // 4:
            common |= dict(temperature=0.4, top_p=0.9)
        else:
            common |= dict(temperature=0.5) | kinds[i % len(kinds)]
        params.append(SamplingParams(**common))
    return params


PROMPTS, PARAMS = repetitive_prompts(), parameters()


def equal(a: Generated, b: Generated) -> bool:
    for x, y in zip(a.logprobs + a.prompt_logprobs, b.logprobs + b.prompt_logprobs, strict=True):
        assert x.token_ids[0] == y.token_ids[0]
        np.testing.assert_allclose(x.logprobs, y.logprobs, atol=2e-4)
    assert a.finished is not None and b.finished is not None
    ends = [(end.reason, end.stop_reason) for end in (a.finished, b.finished)]
    return a.token_ids == b.token_ids and ends[0] == ends[1]


def run_all(core: EngineCore) -> tuple[list[Generated], int, int]:
    """Results, and how many tokens were drafted and accepted."""
    stats: list[SchedulerStats] = []
    results = run(core, PROMPTS, PARAMS, stats=stats, max_steps=50 * NUM_PROMPTS)
    drafts = [s.spec_decode for s in stats if s.spec_decode is not None]
    return (
        results,
        sum(d.num_draft_tokens for d in drafts),
        sum(d.num_accepted_tokens for d in drafts),
    )


@pytest.fixture(scope="module")
def plain() -> list[Generated]:
    with tiny_core(**ENGINE) as core:
        results, drafted, _ = run_all(core)
        assert not drafted
        return results


@pytest.fixture(scope="module")
def speculative() -> Iterator[EngineCore]:
    with tiny_core(**ENGINE, speculative_config=NGRAM) as core:
        yield core


def check(results: Sequence[Generated], plain: Sequence[Generated]) -> None:
    different = [i for i, (a, b) in enumerate(zip(results, plain, strict=True)) if not equal(a, b)]
    assert different == []


def test_ngrams(plain, speculative):
    results, drafted, accepted = run_all(speculative)
    check(results, plain)
    assert drafted > 2 * NUM_PROMPTS and accepted > drafted / 10


class Known:
    """Drafts from what the plain engine said, every `wrong`-th token another one (0: none)."""

    def __init__(self, core: EngineCore, plain: Sequence[Generated], wrong: int) -> None:
        self._table = core.scheduler.table
        self._plain, self._wrong = plain, wrong

    def drafts(self, row: int, limit: int) -> Int32:
        request = self._table.requests[row]
        assert request is not None
        start = int(self._table.num_output[row])
        tokens = np.array(self._plain[int(request.request_id)].token_ids[start:], np.int32)
        if self._wrong:
            wrong = (np.arange(len(tokens)) + start) % self._wrong == 0
            tokens = np.where(wrong, (tokens + 1) % 97, tokens).astype(np.int32)
        return tokens[:limit]

    def store(self, step, result) -> None:
        pass

    def clear(self) -> None:
        pass


@pytest.mark.parametrize("wrong", [0, 1, 3], ids=["right", "wrong", "often right"])
def test_whatever_is_drafted(plain, speculative, wrong):
    speculation = speculative.scheduler.speculation
    source = speculation.source
    speculation.source = Known(speculative, plain, wrong)
    results, drafted, accepted = run_all(speculative)
    speculation.source = source
    check(results, plain)
    assert drafted > 4 * NUM_PROMPTS
    if wrong == 0:
        assert accepted == drafted
    elif wrong == 1:
        assert accepted == 0
    else:
        assert 0.2 < accepted / drafted < 0.9


@pytest.mark.parametrize(
    ("args", "chosen"),
    [
        (
            dict(
                num_gpu_blocks_override=24,
                max_num_batched_tokens=32,
                long_prefill_token_threshold=6,
            ),
            slice(0, None, 4),
        ),
        (dict(tensor_parallel_size=2), slice(0, NUM_PROMPTS // 2, 8)),
    ],
    ids=["chunks and preemption", "2 devices"],
)
def test_ngrams_in_other_engines(plain, args, chosen):
    stats: list[SchedulerStats] = []
    with tiny_core(**(ENGINE | args), speculative_config=NGRAM) as core:
        results = run(core, PROMPTS[chosen], PARAMS[chosen], stats=stats, max_steps=9999)
        assert core.scheduler.kv.pool.usage == 0
    check(results, plain[chosen])
    assert sum(s.spec_decode.num_accepted_tokens for s in stats if s.spec_decode) > 10
    if "num_gpu_blocks_override" in args:
        assert sum(s.num_preemptions for s in stats)


def test_nothing_compiles_after_a_full_warm_up():
    args = dict(warmup="all", max_num_seqs=2, max_num_batched_tokens=4, max_model_len=48)
    with tiny_core(**args, speculative_config=NGRAM) as core:
        rng = np.random.default_rng(1)
        kinds = [
            SamplingParams(temperature=0.0, max_tokens=12),
            SamplingParams(temperature=0.3, presence_penalty=0.5, max_tokens=9),
            SamplingParams(temperature=0.0, logprobs=3, prompt_logprobs=2, max_tokens=9),
            SamplingParams(temperature=0.0, allowed_token_ids=[5, 6, 7], max_tokens=9),
        ]
        stats: list[SchedulerStats] = []
        for params in [*kinds, kinds * 3]:
            count = len(params) if isinstance(params, list) else 4
            piece = rng.integers(3, 97, 3).tolist()
            prompts = [(piece * 9)[: int(n)] for n in rng.integers(1, 25, count)]
            run(core, prompts, params, stats=stats)
        assert any(s.spec_decode for s in stats)
        assert executor_of(core).num_compilations == 0


TEXT = "abcabcabcabcabcabcab"


def fade(logits: jax.Array, state: RowState) -> jax.Array:
    """From the third token on, against what the output holds."""
    return jnp.where((state.num_output >= 2)[:, None], logits - state.counts, logits)


@pytest.fixture(scope="module")
def llms() -> Iterator[list[LLM]]:
    made = [
        LLM(
            str(tiny_llm_dir()),
            **SMALL,
            logits_processors={"fade": fade},
            speculative_config=config,
        )
        for config in (None, NGRAM)
    ]
    yield made
    for llm in made:
        llm.shutdown()


@pytest.mark.parametrize(
    "params",
    [
        dict(n=3, temperature=0.8, seed=4),
        dict(temperature=0.0, logprobs=2),
        dict(
            temperature=0.0, structured_outputs=StructuredOutputsParams(regex="(abc|abd|xy){2,9}")
        ),
        dict(
            temperature=1.0, seed=2, structured_outputs=StructuredOutputsParams(regex="[a-d]{3,20}")
        ),
        dict(temperature=1.0, seed=3, bad_words=["a", "bc"]),
        dict(temperature=0.0, extra_args={"logits_processors": {"fade": {}}}, logprobs=1),
        dict(temperature=0.0, logprob_token_ids=[5, 9], flat_logprobs=True),
    ],
    ids=["n", "logprobs", "regex", "seeded regex", "bad words", "processor", "given tokens"],
)
def test_through_the_front_door(llms, params):
    """Twice, so that the second time reads the prefix cache; then cut by a string that the output holds."""
    given = SamplingParams(max_tokens=20, **params)
    prompts = [TEXT, TEXT[:7], TEXT + "xyxyxyxyx"]
    texts = []
    for llm in llms:
        for _ in range(2):
            outputs = llm.generate(prompts, given, use_tqdm=False)
            texts.append(
                [
                    (c.text, c.token_ids, c.finish_reason, c.stop_reason)
                    for o in outputs
                    for c in o.outputs
                ]
            )
    assert texts[0] == texts[1] == texts[2] == texts[3]
    stop = texts[0][0][0][5:7]
    given = SamplingParams(max_tokens=20, stop=[stop], **params)
    cut = [
        [
            (c.text, c.token_ids, c.finish_reason, c.stop_reason, len(c.logprobs or []))
            for c in o.outputs
        ]
        for llm in llms
        for o in llm.generate(prompts, given, use_tqdm=False)
    ]
    assert cut[: len(prompts)] == cut[len(prompts) :]
    assert any(reason == stop for output in cut for *_, reason, _ in output)


def test_what_the_metrics_say(llms):
    plain, speculative = ({m.name: m for m in llm.get_metrics()} for llm in llms)
    name = "jaxinfer:spec_decode_num_"
    assert not any(key.startswith(name) for key in plain)
    accepted = speculative[name + "accepted_tokens"].value
    per_pos = speculative[name + "accepted_tokens_per_pos"].values
    assert 0 < sum(per_pos) == accepted < speculative[name + "draft_tokens"].value
    assert len(per_pos) == 3 and per_pos[0] <= speculative[name + "drafts"].value


def test_what_is_refused():
    for config, message in [
        ({}, "method must be one of"),
        (dict(method="oracle", num_speculative_tokens=2), "method must be one of .* got 'oracle'"),
        (dict(method="ngram"), "needs num_speculative_tokens"),
        (NGRAM | dict(num_speculative_tokens=0), "num_speculative_tokens must be an integer of at"),
        (NGRAM | dict(prompt_lookup_min=4), r"prompt_lookup_min \(4\) must be at most"),
        (NGRAM | dict(lookahead=1), "unknown keys .'lookahead'."),
        (NGRAM | dict(disable_by_batch_size=-1), "disable_by_batch_size must be"),
    ]:
        with pytest.raises(ValueError, match=message):
            LLM(str(tiny_llm_dir()), **SMALL, speculative_config=config)
    assert TOKENIZER.vocab_size
