"""Logprobs of given tokens, and logprobs as flat arrays, through `LLM` against transformers' logits."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from scipy.special import log_softmax

from jaxinfer import LLM, AsyncLLM, FlatLogprobs, RequestOutputKind, SamplingParams
from tests.frontend.story_engine import story_engine
from tests.tiny_llm import SMALL, VOCAB, ids, oracle_logits, tiny_llm_dir

PROMPTS = ["The lazy dog", "fox", "x" * 20]


@pytest.fixture(scope="module")
def llm():
    with LLM(str(tiny_llm_dir()), **SMALL) as llm:
        yield llm


def sampled(**fields) -> SamplingParams:
    return SamplingParams(temperature=1.5, seed=3, max_tokens=9, ignore_eos=True, **fields)


def test_given_tokens_are_scored_beside_requests_for_the_likeliest(llm):
    given = [70, 5, 33, 5, VOCAB - 1]
    params = [sampled(logprob_token_ids=given, logprobs=2), sampled(logprobs=3), sampled()]
    named, likeliest, none = llm.generate(PROMPTS, params, use_tqdm=False)
    for output in (named, likeliest):
        completion, num_prompt = output.outputs[0], len(output.prompt_token_ids)
        oracle = log_softmax(oracle_logits(output.prompt_token_ids + completion.token_ids), axis=1)
        for i, token in enumerate(completion.token_ids):
            entries, expected = completion.logprobs[i], oracle[num_prompt - 1 + i]
            if output is named:
                assert list(entries) == list(dict.fromkeys([token, *given]))
                assert all(p.rank is None for t, p in entries.items() if t != token)
            else:
                best = set(np.argsort(-expected)[:3].tolist())
                assert set(entries) == best | {token}
            assert entries[token].rank == 1 + (expected > expected[token]).sum()
            for other, entry in entries.items():
                assert entry.logprob == pytest.approx(expected[other], abs=1e-4)
    assert none.outputs[0].logprobs is None


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (dict(logprob_token_ids=[VOCAB]), rf"logprob_token_ids holds token id {VOCAB}"),
        (dict(logprob_token_ids=range(21)), "logprob_token_ids may hold at most 20 tokens"),
        (dict(logprob_token_ids="abc"), "logprob_token_ids must be a list"),
        (dict(logprob_token_ids=[-1]), r"logprob_token_ids\[0\] must be at least 0"),
        (dict(flat_logprobs=1), "flat_logprobs must be True or False"),
    ],
)
def test_refused(llm, fields, message):
    with pytest.raises(ValueError, match=message):
        llm.generate("a", SamplingParams(**fields), use_tqdm=False)
    assert llm.generate("a", SamplingParams(max_tokens=1), use_tqdm=False)[0].finished


@pytest.mark.parametrize(
    ("more", "num_entries"), [(dict(logprobs=4), 5), (dict(logprob_token_ids=[7, 50]), 3)]
)
def test_flat_logprobs_hold_what_dicts_hold(llm, more, num_entries):
    more = dict(prompt_logprobs=2, **more)
    plain = llm.generate(PROMPTS, sampled(**more), use_tqdm=False)
    flat = llm.generate(PROMPTS, sampled(**more, flat_logprobs=True), use_tqdm=False)
    for one, other in zip(plain, flat, strict=True):
        output, prompt = other.outputs[0].logprobs, other.prompt_logprobs
        assert isinstance(output, FlatLogprobs) and isinstance(prompt, FlatLogprobs)
        assert one.outputs[0].token_ids == output.token_ids[output.offsets[:-1]].tolist()
        np.testing.assert_array_equal(np.diff(output.offsets), [num_entries] * 9)
        np.testing.assert_array_equal(np.diff(prompt.offsets), [0, *[3] * (len(prompt) - 1)])
        for flattened, dicts in ((output, one.outputs[0].logprobs), (prompt, one.prompt_logprobs)):
            assert [x and list(x) for x in flattened] == [x and list(x) for x in dicts]
            for mine, theirs in zip(flattened, dicts, strict=True):
                for token in mine or ():
                    assert mine[token].rank == theirs[token].rank
                    assert mine[token].decoded_token == theirs[token].decoded_token
                    assert mine[token].logprob == pytest.approx(theirs[token].logprob, abs=1e-5)
    assert ids(PROMPTS[0])[1] in flat[0].prompt_logprobs[1]


@pytest.mark.parametrize("kind", list(RequestOutputKind))
def test_streams_of_flat_logprobs(kind):
    """Of a fake device, which scores a token by its number."""

    async def use():
        engine, executor = story_engine()
        executor.num_logprobs, executor.prompt_logprobs = 3, True
        llm = AsyncLLM.from_engine(engine)
        try:
            params = dict(logprobs=2, prompt_logprobs=1, max_tokens=12, output_kind=kind)
            collected = []
            for flat in (False, True):
                outputs = [
                    output
                    async for output in llm.generate(
                        "once", SamplingParams(**params, flat_logprobs=flat)
                    )
                ]
                collected.append(outputs)
            return collected
        finally:
            llm.shutdown()

    plain, flat = asyncio.run(use())
    for outputs in (plain, flat):
        if kind is not RequestOutputKind.DELTA:
            del outputs[:-1]
        for later in outputs[1:]:
            outputs[0].add(later)
    one, other = plain[0], flat[0]
    assert isinstance(other.outputs[0].logprobs, FlatLogprobs)
    assert list(other.outputs[0].logprobs) == one.outputs[0].logprobs
    assert len(other.outputs[0].logprobs) == 12
    assert list(other.prompt_logprobs) == one.prompt_logprobs
    assert other.outputs[0].cumulative_logprob == one.outputs[0].cumulative_logprob
