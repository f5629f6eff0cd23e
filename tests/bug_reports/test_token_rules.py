"""Cases in which rules about tokens met: each got an answer that was cut, refused late, or took the engine down."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from jaxinfer import LLM, AsyncLLM, SamplingParams
from tests.tiny_llm import EOS, SMALL, ids, oracle_greedy, tiny_llm_dir

ARGS = dict(dtype="float32", **SMALL)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(str(tiny_llm_dir()), **ARGS) as llm:
        yield llm


def one(llm: LLM, prompt: str, **params):
    [output] = llm.generate(prompt, SamplingParams(**params), use_tqdm=False)
    return output.outputs[0]


def test_a_bias_and_a_stop_for_a_token_that_does_not_exist(llm):
    """logit_bias {"999999": 5} and stop_token_ids [999999] with min_tokens 2: refused, engine alive."""
    for params in (dict(logit_bias={"999999": 5}), dict(stop_token_ids=[999999], min_tokens=2)):
        with pytest.raises(ValueError, match=f"{next(iter(params))} holds token id 999999"):
            one(llm, "abc", **params)
    expected = oracle_greedy(ids("abc"), 4)
    assert one(llm, "abc", temperature=0.0, max_tokens=4, ignore_eos=True).token_ids == expected


def test_exactly_as_many_tokens_as_both_limits_say(llm):
    """min_tokens = max_tokens = 20 with stop ["\\n"] and several EOS ids: exactly 20 tokens."""
    favoured = {EOS: 100, ids("q")[0]: 100, ids("z")[0]: 50}
    params = dict(
        temperature=0.0,
        min_tokens=20,
        max_tokens=20,
        stop=["\n", "zz"],
        stop_token_ids=[ids("q")[0]],
        logit_bias=favoured,
    )
    completion = one(llm, "abc", **params)
    assert completion.token_ids == ids("z" * 20) and completion.finish_reason == "length"
    # Without the minimum the same request ends at once.
    assert one(llm, "abc", **params | dict(min_tokens=0)).token_ids in ([EOS], ids("q"))


def test_top_k_of_zero_is_off(llm):
    """Temperature 1, top_k=0: 20 samples are not all equal."""
    [output] = llm.generate(
        "abc", SamplingParams(temperature=1.0, top_k=0, n=20, max_tokens=4, seed=3), use_tqdm=False
    )
    assert len({tuple(completion.token_ids) for completion in output.outputs}) > 10
    greedy = one(llm, "abc", temperature=1.0, top_k=1, max_tokens=4, ignore_eos=True)
    assert greedy.token_ids == oracle_greedy(ids("abc"), 4)


def test_two_requests_with_the_same_id():
    """Two concurrent requests with the same client-given id: both answered correctly."""

    async def use():
        llm = AsyncLLM(str(tiny_llm_dir()), **ARGS)

        async def ask(prompt: str) -> list[int]:
            params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
            async for output in llm.generate(prompt, params, request_id="mine"):
                assert output.request_id == "mine"
            return output.outputs[0].token_ids

        try:
            return await asyncio.gather(ask("abc"), ask("xyz?"))
        finally:
            llm.shutdown()

    assert asyncio.run(use()) == [oracle_greedy(ids(p), 8) for p in ("abc", "xyz?")]
