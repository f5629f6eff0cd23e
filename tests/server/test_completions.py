from __future__ import annotations

import pytest

from tests.frontend.story_engine import STORY, TOKENIZER, continuation
from tests.server.story_server import StoryServer, run

PATH = "/v1/completions"


def test_completes_one_prompt_with_the_fields_of_openai():
    async def use(server: StoryServer):
        return await server.ok(PATH, model="story", prompt="once", max_tokens=8)

    body = run(use)
    assert body["id"].startswith("cmpl-") and body["object"] == "text_completion"
    assert body["model"] == "story" and body["created"] > 0
    [choice] = body["choices"]
    assert choice["text"] == continuation(4, 8) and choice["index"] == 0
    assert choice["finish_reason"] == "length" and choice["logprobs"] is None
    usage = body["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (4, 8, 12)
    assert usage["prompt_tokens_details"] == {"cached_tokens": 0}


def test_cached_prompt_tokens_are_told_unless_the_salt_differs():
    async def use(server: StoryServer):
        counts = []
        for salt in ({}, {}, {"cache_salt": "mine"}, {"cache_salt": "mine"}):
            body = await server.ok(PATH, prompt="once upon a time", max_tokens=2, **salt)
            counts.append(body["usage"]["prompt_tokens_details"]["cached_tokens"])
        hits = await server.metric("jaxinfer:prefix_cache_hits_total")
        queries = await server.metric("jaxinfer:prefix_cache_queries_total")
        return counts, hits, queries

    counts, hits, queries = run(use)
    assert counts[0] == counts[2] == 0 and counts[1] == counts[3] > 0
    assert hits == sum(counts) and queries == 4 * 16


def test_sixteen_tokens_by_default_unless_the_model_says_otherwise():
    async def use(server: StoryServer):
        return (await server.ok(PATH, prompt="a"))["usage"]["completion_tokens"]

    assert run(use) == 16
    assert run(use, generation_config={"max_new_tokens": 5}) == 5


def test_several_prompts_of_every_kind_and_n_of_each_keep_their_order():
    ids = TOKENIZER.encode("abc")

    async def use(server: StoryServer):
        two = await server.ok(PATH, prompt=["a", "ab"], n=2, max_tokens=3)
        tokens = await server.ok(PATH, prompt=ids, max_tokens=3)
        lists = await server.ok(PATH, prompt=[ids, ids[:1]], max_tokens=3)
        return two, tokens, lists

    two, tokens, lists = run(use)
    assert [c["index"] for c in two["choices"]] == [0, 1, 2, 3]
    assert [c["text"] for c in two["choices"]] == [continuation(n, 3) for n in (1, 1, 2, 2)]
    assert two["usage"]["prompt_tokens"] == 3 and two["usage"]["completion_tokens"] == 12
    assert [c["text"] for c in tokens["choices"]] == [continuation(3, 3)]
    assert [c["text"] for c in lists["choices"]] == [continuation(3, 3), continuation(1, 3)]


def test_stop_strings_and_stop_tokens():
    async def use(server: StoryServer):
        stop_id = TOKENIZER.encode("f")[0]
        return [
            (await server.ok(PATH, prompt="once", max_tokens=50, **more))["choices"][0]
            for more in (
                dict(stop="fox"),
                dict(stop=["quick", "fox"], include_stop_str_in_output=True),
                dict(stop_token_ids=[stop_id]),
                dict(stop=[]),
            )
        ]

    cut, kept, token, none = run(use)
    before = STORY[4:].split("fox")[0]
    assert (cut["text"], cut["finish_reason"], cut["stop_reason"]) == (before, "stop", "fox")
    assert (kept["text"], kept["stop_reason"]) == (before + "fox", "fox")
    assert (token["text"], token["stop_reason"]) == (before, TOKENIZER.encode("f")[0])
    assert none["finish_reason"] == "length"


def test_echo_logprobs_and_offsets():
    async def use(server: StoryServer):
        server.executor.num_logprobs = 3
        server.executor.prompt_logprobs = True
        return (
            await server.ok(PATH, prompt="once", max_tokens=3, logprobs=2),
            await server.ok(PATH, prompt="once", max_tokens=3, logprobs=2, echo=True),
            await server.ok(PATH, prompt="once", max_tokens=0, logprobs=1, echo=True),
            await server.ok(PATH, prompt=TOKENIZER.encode("once"), max_tokens=1, echo=True),
        )

    plain, echo, scored, from_ids = (body["choices"][0] for body in run(use))
    after = continuation(4, 3)
    assert plain["text"] == after and plain["logprobs"]["tokens"] == list(after)
    assert plain["logprobs"]["text_offset"] == [0, 1, 2]
    # The fake device says minus the token's id, and the ids after it for the others.
    ids = TOKENIZER.encode(after)
    assert plain["logprobs"]["token_logprobs"] == [-i for i in ids]
    assert [max(top.values()) for top in plain["logprobs"]["top_logprobs"]] == [-i for i in ids]
    assert all(len(top) == 2 for top in plain["logprobs"]["top_logprobs"])

    assert echo["text"] == "once" + after
    assert echo["logprobs"]["tokens"] == list("once" + after)
    assert echo["logprobs"]["text_offset"] == list(range(7))
    assert echo["logprobs"]["token_logprobs"][0] is None
    assert echo["logprobs"]["token_logprobs"][1:] == [-i for i in TOKENIZER.encode("nce" + after)]

    assert scored["text"] == "once" and len(scored["logprobs"]["tokens"]) == 4
    assert from_ids["text"] == "once" + continuation(4, 1)


def test_vllm_extras_token_ids_prompt_logprobs_and_truncation():
    async def use(server: StoryServer):
        server.executor.num_logprobs = 3
        server.executor.prompt_logprobs = True
        more = dict(max_tokens=2, logprobs=0, return_tokens_as_token_ids=True)
        first = await server.ok(
            PATH, prompt="once", return_token_ids=True, prompt_logprobs=1, **more
        )
        cut = [
            await server.ok(PATH, prompt="once", max_tokens=2, truncate_prompt_tokens=3, **side)
            for side in (dict(return_token_ids=True), dict(truncation_side="right", echo=True))
        ]
        return first["choices"][0], cut

    choice, (left, right) = run(use)
    ids, new = TOKENIZER.encode("once"), TOKENIZER.encode(continuation(4, 2))
    assert choice["prompt_token_ids"] == ids and choice["token_ids"] == new
    assert choice["logprobs"]["tokens"] == [f"token_id:{i}" for i in new]
    assert choice["prompt_logprobs"][0] is None
    assert choice["prompt_logprobs"][1][str(ids[1])]["logprob"] == -ids[1]
    assert left["choices"][0]["prompt_token_ids"] == TOKENIZER.encode("nce")
    assert right["choices"][0]["text"] == "onc" + continuation(3, 2)


def test_stream_joined_is_the_answer():
    async def use(server: StoryServer):
        body = dict(prompt=["once", "a"], n=2, max_tokens=9, stop="pon")
        whole = await server.ok(PATH, **body)
        return whole, await server.events(PATH, stream_options={"include_usage": True}, **body)

    whole, events = run(use)
    texts, reasons = dict.fromkeys(range(4), ""), {}
    for event in events[:-1]:
        assert event["object"] == "text_completion" and event["usage"] is None
        for choice in event["choices"]:
            assert choice["index"] not in reasons, "a chunk after the end"
            texts[choice["index"]] += choice["text"]
            if choice["finish_reason"]:
                reasons[choice["index"]] = choice["finish_reason"]
    assert len({event["id"] for event in events}) == 1
    assert texts == {c["index"]: c["text"] for c in whole["choices"]}
    assert reasons == {c["index"]: c["finish_reason"] for c in whole["choices"]}
    assert events[-1]["choices"] == [] and events[-1]["usage"] == whole["usage"]


def test_stream_carries_logprobs_offsets_and_running_usage():
    async def use(server: StoryServer):
        server.executor.num_logprobs = 3
        options = {"include_usage": True, "continuous_usage_stats": True}
        return await server.events(
            PATH, prompt="once", max_tokens=6, logprobs=1, stream_options=options
        )

    *events, last = run(use)
    joined: dict[str, list] = {"tokens": [], "text_offset": []}
    for event in events:
        for name, values in joined.items():
            values += event["choices"][0]["logprobs"][name]
        assert event["usage"]["completion_tokens"] == len(joined["tokens"])
    assert joined["tokens"] == list(continuation(4, 6))
    assert joined["text_offset"] == list(range(6))
    assert last["usage"]["completion_tokens"] == 6


def test_stream_echo_and_no_usage_unless_asked():
    async def use(server: StoryServer):
        return await server.events(PATH, prompt="once", max_tokens=4, echo=True)

    events = run(use)
    assert "".join(e["choices"][0]["text"] for e in events) == STORY[:8]
    assert all("usage" not in event for event in events)


@pytest.mark.parametrize("stream", [False, True])
def test_a_failing_step_is_a_server_error(stream):
    async def use(server: StoryServer):
        server.executor.is_invalid = lambda context: len(context) >= 8
        response = await server.post(PATH, prompt="once", max_tokens=20, stream=stream)
        alive = await server.ok(PATH, prompt="a", max_tokens=2)
        return response, alive

    response, alive = run(use)
    assert "NaN logits" in response.text and alive["choices"][0]["text"]
    if stream:
        assert response.status_code == 200
        assert '"type":"internal_server_error"' in response.text
        assert response.text.endswith("data: [DONE]\n\n")
    else:
        assert response.status_code == 500
