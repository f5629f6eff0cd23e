"""`AsyncLLM` over the real engine core and a fake device that tells a story."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

import pytest

from jaxinfer import (
    AsyncLLM,
    EngineDeadError,
    RequestFailedError,
    RequestOutputKind,
    SamplingParams,
)
from tests.frontend.story_engine import TOKENIZER, continuation, story_engine, tell

CUMULATIVE, DELTA, FINAL = RequestOutputKind
SOME = SamplingParams(max_tokens=6, temperature=0)


@pytest.fixture
def serve():
    """Run a coroutine function with an `AsyncLLM`, within a time limit; check that nothing is left in the engine."""

    def serve(use, next_token=tell, **engine_args):
        engine, executor = story_engine(next_token, **engine_args)
        llm = AsyncLLM.from_engine(engine)

        async def limited():
            async with asyncio.timeout(60):
                await use(llm, executor)
                while engine.core.scheduler.requests:  # an abort travels to the engine's thread
                    await asyncio.sleep(0.001)

        try:
            asyncio.run(limited())
        finally:
            llm.shutdown()
        assert executor.shut_down

    return serve


async def collect(llm, prompt, params, **kwargs):
    return [output async for output in llm.generate(prompt, params, **kwargs)]


def streamed(kind, max_tokens=12, **params):
    return SamplingParams(max_tokens=max_tokens, output_kind=kind, **params)


def test_streams_of_every_kind(serve):
    async def use(llm, _):
        for kind in RequestOutputKind:
            outputs = await collect(llm, "once", streamed(kind))
            texts = [o.outputs[0].text for o in outputs]
            assert ("".join(texts) if kind is DELTA else texts[-1]) == continuation(4, 12)
            assert [o.finished for o in outputs[:-1]] == [False] * (len(outputs) - 1)
            assert outputs[-1].finished
            assert kind is not FINAL or len(outputs) == 1

    serve(use)


def test_many_at_once(serve):
    async def use(llm, _):
        lengths = [1 + i % 13 for i in range(40)]
        runs = [collect(llm, "once", streamed(DELTA, n)) for n in lengths]
        for n, outputs in zip(lengths, await asyncio.gather(*runs), strict=True):
            assert "".join(o.outputs[0].text for o in outputs) == continuation(4, n)

    serve(use)


def test_a_slow_reader_loses_nothing(serve):
    async def use(llm, executor):
        text, ids, number = "", [], 0
        async for output in llm.generate("once", streamed(DELTA, 60)):
            text += output.outputs[0].text
            ids += output.outputs[0].token_ids
            number += 1
            while len(executor.plans) < 60:
                await asyncio.sleep(0.001)
        assert text == continuation(4, 60) and len(ids) == 60
        assert number < 60, "what came in between arrives in one piece"

    serve(use)


def test_same_id_twice_at_once(serve):
    async def use(llm, _):
        one = collect(llm, "once", streamed(FINAL, 5), request_id="same")
        two = collect(llm, "once up", streamed(FINAL, 5), request_id="same")
        (a,), (b,) = await asyncio.gather(one, two)
        assert (a.request_id, b.request_id) == ("same", "same")
        assert (a.outputs[0].text, b.outputs[0].text) == (continuation(4, 5), continuation(7, 5))

    serve(use)


def endless(context):
    return TOKENIZER.encode("a")[0]


LONG = {"next_token": endless, "max_model_len": 4000, "num_blocks": 3000}


def test_abort_by_id_ends_the_stream(serve):
    async def use(llm, _):
        outputs = []
        async for output in llm.generate("x", streamed(CUMULATIVE, None), request_id="mine"):
            outputs.append(output)
            if len(outputs) == 2:
                await llm.abort("mine")
        assert outputs[-1].finished and outputs[-1].outputs[0].finish_reason == "abort"
        await llm.abort("never seen")

    serve(use, **LONG)


def test_leaving_or_cancelling_a_stream_aborts_the_request(serve):
    async def use(llm, executor):
        async with aclosing(llm.generate("x", streamed(DELTA, None))) as outputs:
            async for _ in outputs:
                break
        task = asyncio.create_task(collect(llm, "x", streamed(DELTA, None)))
        while len(executor.plans) < 10:
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        # `serve` waits until the engine has let go of both; neither could have ended by itself so soon.

    serve(use, **LONG)


def test_refused_requests_raise_where_they_are_read(serve):
    async def use(llm, executor):
        with pytest.raises(ValueError, match="empty"):
            await collect(llm, "", SOME)
        with pytest.raises(ValueError, match="stop_token_ids"):
            await collect(llm, "a", SamplingParams(stop_token_ids=[999999], min_tokens=2))
        assert executor.plans == []
        assert (await collect(llm, "once", SOME))[-1].outputs[0].text == continuation(4, 6)

    serve(use)


def test_the_prefix_cache_is_reset_between_requests(serve):
    prompt = "o" * 99

    cached = []

    async def use(llm, executor):
        for reset in (False, False, True, False):
            if reset:
                assert await llm.reset_prefix_cache()
            outputs = await collect(llm, prompt, SOME)
            cached.append(outputs[-1].num_cached_tokens)

    serve(use)
    assert cached == [0, cached[1], 0, cached[1]] and 80 < cached[1] < 99


def test_a_dying_engine_fails_every_stream(serve):
    def dies(context):
        if len(context) > 30:
            raise RuntimeError("the device fell off")
        return tell(context)

    async def use(llm, _):
        runs = [collect(llm, "once", streamed(DELTA, 60)) for _ in range(5)]
        for result in await asyncio.gather(*runs, return_exceptions=True):
            assert isinstance(result, RequestFailedError) and "fell off" in str(result)
        with pytest.raises(EngineDeadError):
            await collect(llm, "once", SOME)

    serve(use, dies)


def test_several_completions_stream_side_by_side(serve):
    async def use(llm, _):
        texts = {0: "", 1: ""}
        async for output in llm.generate("once", streamed(DELTA, 5, n=2)):
            for completion in output.outputs:
                texts[completion.index] += completion.text
        assert texts == dict.fromkeys((0, 1), continuation(4, 5))

    serve(use)


def test_one_engine_serves_one_loop_after_another():
    llm = AsyncLLM.from_engine(story_engine()[0])
    try:
        for _ in range(2):
            outputs = asyncio.run(collect(llm, "once", SOME))
            assert outputs[-1].outputs[0].text == continuation(4, 6)
    finally:
        llm.shutdown()


def test_shutdown_ends_those_who_wait():
    async def use():
        llm = AsyncLLM.from_engine(story_engine(**LONG)[0])
        task = asyncio.create_task(collect(llm, "x", streamed(CUMULATIVE, None)))
        while not task.done() and not llm._outputs.num_unfinished:
            await asyncio.sleep(0)
        llm.shutdown()
        outputs = await asyncio.wait_for(task, 60)
        assert outputs[-1].outputs[0].finish_reason == "abort"

    asyncio.run(use())
