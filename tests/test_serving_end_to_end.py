"""Streams, aborts, priorities and ways to load a model, over the real executor."""

from __future__ import annotations

import asyncio

import pytest

from jaxinfer import LLM, AsyncLLM, EngineArgs, RequestOutputKind, SamplingParams
from jaxinfer.convert import convert
from jaxinfer.engine_factory import build_engine
from tests.tiny_llm import SMALL, TOKENIZER, copy_of_tiny_llm, ids, oracle_greedy, tiny_llm_dir

CUMULATIVE, DELTA, FINAL = RequestOutputKind
PROMPTS = ["The quick brown fox", "jumps", "over the lazy dog", "a"]


def greedy(max_tokens=10, **fields):
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, **fields)


def tokens_of(outputs):
    return [output.outputs[0].token_ids for output in outputs]


# ---- AsyncLLM --------------------------------------------------------------------------------------------------------


def test_streams_and_aborts_over_the_real_executor():
    """One engine for all of it; its context is long enough that no request ends before it is aborted."""
    args = EngineArgs(
        str(tiny_llm_dir()),
        hf_overrides={"max_position_embeddings": 4096},
        **SMALL | dict(max_model_len=4000, block_size=64),
    )
    engine = build_engine(args)
    pool = engine.core.scheduler.kv.pool
    all_free = pool.num_free
    llm = AsyncLLM.from_engine(engine)

    async def stream(prompt, params, **kwargs):
        return [output async for output in llm.generate(prompt, params, **kwargs)]

    async def abort_after_two(request_id):
        outputs = []
        params = greedy(None, output_kind=CUMULATIVE)
        async for output in llm.generate("abort me", params, request_id=request_id):
            outputs.append(output)
            if len(outputs) == 2:
                await llm.abort(request_id)
        return outputs

    async def leave_early():
        outputs = llm.generate("leave me", greedy(None, output_kind=DELTA))
        await anext(outputs)
        await outputs.aclose()

    async def use():
        kinds = [CUMULATIVE, DELTA, FINAL, DELTA]
        streams = [stream(p, greedy(output_kind=k)) for p, k in zip(PROMPTS, kinds, strict=True)]
        *found, aborted, _ = await asyncio.gather(*streams, abort_after_two("mine"), leave_early())
        for prompt, kind, outputs in zip(PROMPTS, kinds, found, strict=True):
            expected = oracle_greedy(ids(prompt), 10)
            parts = [output.outputs[0] for output in outputs]
            if kind is DELTA:
                assert [t for part in parts for t in part.token_ids] == expected
                assert "".join(part.text for part in parts) == TOKENIZER.decode(expected)
            else:
                assert parts[-1].token_ids == expected
                assert parts[-1].text == TOKENIZER.decode(expected)
            assert kind is not FINAL or len(parts) == 1
            assert [part.finish_reason for part in parts[:-1]] == [None] * (len(parts) - 1)
            assert outputs[-1].finished and parts[-1].finish_reason == "length"
        last = aborted[-1].outputs[0]
        assert aborted[-1].finished and last.finish_reason == "abort"
        assert 2 <= len(last.token_ids) < 3000
        # An abort travels to the engine's thread.
        while engine.core.scheduler.requests:
            await asyncio.sleep(0.001)
        assert pool.num_free == all_free
        (output,) = await stream(PROMPTS[0], greedy(output_kind=FINAL))
        assert output.outputs[0].token_ids == oracle_greedy(ids(PROMPTS[0]), 10)

    async def limited():
        async with asyncio.timeout(120):
            await use()

    try:
        asyncio.run(limited())
    finally:
        llm.shutdown()


# ---- priorities ------------------------------------------------------------------------------------------------------


def test_lower_priorities_go_first_where_one_request_runs_at_a_time():
    args = SMALL | dict(max_num_seqs=1, scheduling_policy="priority")
    with LLM(str(tiny_llm_dir()), **args) as llm:
        priorities = [3, -1, 2, 2]
        outputs = llm.generate(PROMPTS, greedy(), use_tqdm=False, priority=priorities)
    started = [output.metrics.first_scheduled_time for output in outputs]
    assert sorted(range(4), key=started.__getitem__) == [1, 2, 3, 0]
    ended = [output.metrics.finished_time for output in outputs]
    assert ended[1] <= ended[2] <= ended[3] <= ended[0]
    assert tokens_of(outputs) == [oracle_greedy(ids(prompt), 10) for prompt in PROMPTS]


# ---- where the weights come from -------------------------------------------------------------------------------------


def test_dummy_weights_need_no_weights_and_follow_the_engine_seed(tmp_path):
    directory = copy_of_tiny_llm(tmp_path / "model")
    for file in directory.glob("*.safetensors"):
        file.unlink()

    def tokens(seed):
        args = dict(load_format="dummy", seed=seed)
        with LLM(str(directory), **args, **SMALL) as llm:
            return tokens_of(llm.generate(PROMPTS, greedy(), use_tqdm=False))

    assert tokens(1) == tokens(1) != tokens(2)


def test_a_converted_checkpoint_gives_identical_logprobs_and_tokens(tmp_path):
    def answers(model):
        with LLM(str(model), **SMALL) as llm:
            params = greedy(logprobs=20, prompt_logprobs=20)
            outputs = llm.generate(PROMPTS, params, use_tqdm=False)
        return tokens_of(outputs), [(o.prompt_logprobs, o.outputs[0].logprobs) for o in outputs]

    converted = convert(str(tiny_llm_dir()), tmp_path / "converted")
    tokens, logprobs = answers(tiny_llm_dir())
    assert tokens == [oracle_greedy(ids(prompt), 10) for prompt in PROMPTS]
    assert answers(converted) == (tokens, logprobs)
    with pytest.raises(ValueError, match="kind 'orbax'"):
        LLM(str(converted), load_format="safetensors")
