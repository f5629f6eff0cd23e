"""`LLM` over the real engine core and a fake device that tells a story."""

from __future__ import annotations

import io

import pytest

from jaxinfer import LLM, EngineDeadError, RequestFailedError, SamplingParams
from tests.frontend.story_engine import TOKENIZER, continuation, story_engine

SOME = SamplingParams(max_tokens=6, temperature=0)


@pytest.fixture
def llm():
    with LLM.from_engine(story_engine()[0]) as llm:
        yield llm


def generate(llm, prompts, params=SOME, **kwargs):
    return llm.generate(prompts, params, use_tqdm=False, **kwargs)


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
