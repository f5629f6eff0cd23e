"""`LLM` and `AsyncLLM` over the real engine core and a fake device that tells a story."""

from __future__ import annotations

import asyncio
import io
from contextlib import aclosing

import pytest

from jaxinfer import (
    LLM,
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
def llm():
    with LLM.from_engine(story_engine()[0]) as llm:
        yield llm


def generate(llm, prompts, params=SOME, **kwargs):
    return llm.generate(prompts, params, use_tqdm=False, **kwargs)


# ---- LLM -------------------------------------------------------------------------------------------------------------


def test_outputs_come_in_the_prompts_order(llm):
    prompts = ["once", "o", "once upon a", *["on"] * 20]
    lengths = [9, 2, 5, *range(1, 21)]
    params = [SamplingParams(max_tokens=n) for n in lengths]
    outputs = generate(llm, prompts, params)
    assert [o.prompt for o in outputs] == prompts
    expected = [continuation(len(p), n) for p, n in zip(prompts, lengths, strict=True)]
    assert [o.outputs[0].text for o in outputs] == expected
    assert all(o.finished and o.outputs[0].finish_reason == "length" for o in outputs)
    assert len({o.request_id for o in outputs}) == len(outputs)


@pytest.mark.parametrize(
    ("prompts", "number"),
    [
        ("once", 1),
        ([1, 2, 3], 1),
        ({"prompt": "once"}, 1),
        (["once", [1, 2], {"prompt_token_ids": [3]}], 3),
        ([[1, 2], [3]], 2),
        ([], 0),
    ],
)
def test_one_prompt_or_many(llm, prompts, number):
    assert len(generate(llm, prompts)) == number


def test_a_bad_prompt_starts_nothing_and_spoils_nothing():
    engine, executor = story_engine()
    llm = LLM.from_engine(engine)
    for bad, message in (("", "prompt 1: prompt must not be empty"), ([99], "prompt 1: .*99")):
        with pytest.raises(ValueError, match=message):
            generate(llm, ["once", bad])
    with pytest.raises(ValueError, match=r"^prompt must not be empty"):
        generate(llm, "")
    with pytest.raises(ValueError, match="prompts must be"):
        generate(llm, None)
    assert executor.plans == [] and not engine.core.has_unfinished()
    assert generate(llm, "once")[0].outputs[0].text == continuation(4, 6)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"params": [SOME]}, r"sampling_params must be one for all or one per prompt \(2\), got 1"),
        ({"priority": [1, 2, 3]}, "priority must be"),
        ({"priority": "ab"}, "priority must be an integer"),
    ],
)
def test_lists_that_do_not_match(llm, kwargs, message):
    with pytest.raises(ValueError, match=message):
        generate(llm, ["a", "b"], **kwargs)


def test_the_models_defaults_apply_when_nothing_is_said():
    engine, _ = story_engine(generation_config={"max_new_tokens": 3, "temperature": 0.5})
    with LLM.from_engine(engine) as llm:
        assert llm.get_default_sampling_params().max_tokens == 3
        assert len(generate(llm, "once", None)[0].outputs[0].token_ids) == 3
        assert len(generate(llm, "once", SamplingParams())[0].outputs[0].token_ids) == 16


def test_a_stop_string_ends_one_request_and_not_the_others(llm):
    params = SamplingParams(max_tokens=40, stop="fox")
    stopped, other = generate(llm, ["once", "once upon"], [params, SamplingParams(max_tokens=40)])
    assert stopped.outputs[0].text == " upon a time there was a "
    assert (stopped.outputs[0].finish_reason, stopped.outputs[0].stop_reason) == ("stop", "fox")
    assert other.outputs[0].text == continuation(9, 40)


def test_several_completions(llm):
    (output,) = generate(llm, "once", SamplingParams(n=3, max_tokens=4, seed=1))
    assert [c.index for c in output.outputs] == [0, 1, 2]
    assert {c.text for c in output.outputs} == {continuation(4, 4)}


def test_cached_prefixes_are_reported_salted_and_forgotten(llm):
    block_size = llm.config.cache.block_size
    prompt = "o" * (2 * block_size + 1)

    def num_cached(prompt, params=SOME):
        (output,) = generate(llm, prompt, params)
        return output.num_cached_tokens

    assert num_cached(prompt) == 0
    assert num_cached(prompt) == num_cached({"prompt": prompt}) == 2 * block_size
    assert num_cached({"prompt": prompt, "cache_salt": "x"}) == 0
    assert num_cached({"prompt": prompt, "cache_salt": "x"}) == 2 * block_size
    assert num_cached(prompt, SamplingParams(max_tokens=1, skip_reading_prefix_cache=True)) == 0
    assert llm.reset_prefix_cache() is True
    # Three completions of one prompt: the first computes it for the others.
    assert num_cached(prompt, SamplingParams(n=3, max_tokens=1)) == 0
    assert num_cached(prompt) == 2 * block_size


def test_conversations_and_beams_share_prefixes_of_the_same_salt_only(llm):
    conversation = [{"role": "user", "content": "o" * 40}]

    def num_cached(salt, conversations=conversation):
        outputs = llm.chat(conversations, SOME, use_tqdm=False, cache_salt=salt)
        return [output.num_cached_tokens for output in outputs]

    first = num_cached("x")
    second = num_cached(["x", "y", None], [conversation] * 3)
    assert first == [0] and second[0] > 0 and second[1:] == [0, 0]
    with pytest.raises(ValueError, match=r"cache_salt must be one for all or one per prompt \(1\)"):
        num_cached(["x", "y"])
    with pytest.raises(ValueError, match="cache_salt must be a non-empty string"):
        num_cached(3)


def test_chat_formats_conversations(llm):
    user = {"role": "user", "content": "hi"}
    text = "<|user|>hi<|end|><|assistant|>"
    (output,) = llm.chat([user], SOME, use_tqdm=False)
    assert output.prompt == text and output.prompt_token_ids == TOKENIZER.encode(text, False)
    both = llm.chat([[user], [user, user]], SOME, use_tqdm=False, add_generation_prompt=False)
    assert [o.prompt for o in both] == ["<|user|>hi<|end|>", "<|user|>hi<|end|>" * 2]
    (own,) = llm.chat(
        [user],
        SOME,
        use_tqdm=False,
        chat_template="{{ mood }} {{ messages[0].content }}",
        chat_template_kwargs={"mood": "glad"},
    )
    assert own.prompt == "glad hi"


def test_a_request_that_fails_is_named_once_the_others_are_done():
    engine, executor = story_engine()
    bad = TOKENIZER.encode("zzz")
    executor.is_invalid = lambda context: list(context[:3]) == bad and len(context) == 5
    with LLM.from_engine(engine) as llm:
        with pytest.raises(
            RequestFailedError, match="1 of 3 requests failed: prompt 1: "
        ) as caught:
            generate(llm, ["once", "zzz", "once upon"])
        assert list(caught.value.failures) == [1]
        texts = [o.outputs[0].text for o in caught.value.outputs]
        assert texts[0] == continuation(4, 6) and texts[2] == continuation(9, 6)
        assert caught.value.outputs[1].outputs[0].finish_reason == "error"
        assert generate(llm, "once")[0].outputs[0].text == continuation(4, 6)


def test_an_interrupt_leaves_nothing_behind():
    calls = []
    engine, _ = story_engine()
    with LLM.from_engine(engine) as llm:
        step = engine.core.step

        def interrupted(*args):
            calls.append(1)
            if len(calls) == 3:
                raise KeyboardInterrupt
            return step()

        engine.core.step = interrupted
        with pytest.raises(KeyboardInterrupt):
            generate(llm, ["once"] * 4, SamplingParams(max_tokens=50))
        assert not engine.core.has_unfinished()
        assert generate(llm, ["once"])[0].outputs[0].text == continuation(4, 6)


def test_a_dead_engine_says_so():
    def broken(context):
        raise RuntimeError("the device fell off")

    with LLM.from_engine(story_engine(broken)[0]) as llm:
        with pytest.raises(RequestFailedError, match="the device fell off"):
            generate(llm, ["once", "upon"])
        with pytest.raises(EngineDeadError):
            generate(llm, "once")


def test_progress_counts_prompts_and_tokens(llm):
    from tqdm import tqdm

    text = io.StringIO()

    def bar(**kwargs):
        return tqdm(file=text, mininterval=0, **kwargs)

    llm.generate(["once", "upon"], SOME, use_tqdm=bar)
    last = text.getvalue().split("\r")[-1]
    assert "2/2" in last and "input: " in last and "output: " in last and "toks/s" in last


# ---- AsyncLLM --------------------------------------------------------------------------------------------------------


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
