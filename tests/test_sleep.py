"""An engine that sleeps holds neither weights nor cache, and wakes up the same."""

from __future__ import annotations

import asyncio

import pytest

from jaxinfer import LLM, AsyncLLM, SamplingParams
from tests.tiny_llm import SMALL, ids, oracle_greedy, tiny_llm_dir

PARAMS = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
PROMPT = "To be, or not to be"


def answer(llm: LLM) -> list[int]:
    return llm.generate(PROMPT, PARAMS, use_tqdm=False)[0].outputs[0].token_ids


@pytest.mark.parametrize("tensor_parallel_size", [1, 2])
@pytest.mark.parametrize("level", [1, 2])
def test_memory_is_given_away_and_taken_back(level, tensor_parallel_size):
    expected = oracle_greedy(ids(PROMPT), 6)
    args = dict(dtype="float32", tensor_parallel_size=tensor_parallel_size, **SMALL)
    with LLM(str(tiny_llm_dir()), **args) as llm:
        assert answer(llm) == expected
        executor = llm._client._core._executor
        runner = executor.runner
        for _ in range(2):
            arrays = [*runner.leaves, *(pages for layer in runner.kv_cache for pages in layer)]
            llm.sleep(level)
            assert llm.is_sleeping() and all(array.is_deleted() for array in arrays)
            with pytest.raises(ValueError, match="sleeps"):
                answer(llm)
            llm.wake_up(tags=["weights"])
            assert llm.is_sleeping()
            llm.wake_up()
            assert not llm.is_sleeping()
            executor.reset_num_compilations()
            output = llm.generate(PROMPT, PARAMS, use_tqdm=False)[0]
            # Nothing of the old cache is found in the new one.
            assert output.num_cached_tokens == 0 and output.outputs[0].token_ids == expected
            assert executor.num_compilations == 0


def test_asleep_in_asyncio():
    async def use():
        llm = AsyncLLM(str(tiny_llm_dir()), dtype="float32", **SMALL)
        try:
            await llm.sleep()
            assert await llm.is_sleeping()
            with pytest.raises(ValueError, match="sleeps"):
                async for _ in llm.generate(PROMPT, PARAMS):
                    pass
            await llm.wake_up()
            async for output in llm.generate(PROMPT, PARAMS):
                last = output
            return last.outputs[0].token_ids
        finally:
            llm.shutdown()

    assert asyncio.run(use()) == oracle_greedy(ids(PROMPT), 6)
