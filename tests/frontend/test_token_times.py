"""Each token is timed, also a request's last one."""

from __future__ import annotations

import asyncio

import pytest

from jaxinfer import LLM, AsyncLLM, SamplingParams
from tests.frontend.story_engine import story_engine

LENGTHS = (1, 2, 5)


def with_llm():
    with LLM.from_engine(story_engine()[0]) as llm:
        params = [SamplingParams(max_tokens=n) for n in LENGTHS]
        llm.generate(["once"] * len(LENGTHS), params, use_tqdm=False)
        return llm.get_metrics()


def with_async_llm():
    llm = AsyncLLM.from_engine(story_engine()[0])

    async def read(max_tokens: int) -> None:
        async for _ in llm.generate("once", SamplingParams(max_tokens=max_tokens)):
            pass

    async def use():
        await asyncio.gather(*map(read, LENGTHS))
        return llm.get_metrics()

    try:
        return asyncio.run(use())
    finally:
        llm.shutdown()


@pytest.mark.parametrize("run", [with_llm, with_async_llm])
def test_every_token_is_timed(run):
    counts = {m.name: m.count for m in run() if hasattr(m, "count")}
    assert counts["jaxinfer:time_to_first_token_seconds"] == len(LENGTHS)
    assert counts["jaxinfer:inter_token_latency_seconds"] == sum(LENGTHS) - len(LENGTHS)
