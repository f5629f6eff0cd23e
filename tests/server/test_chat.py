from __future__ import annotations

import pytest

from tests.frontend.story_engine import TOKENIZER, continuation
from tests.server.story_server import StoryServer, run

PATH = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "hi"}]
PROMPT = "<|user|>hi<|end|><|assistant|>"
NUM_PROMPT = len(TOKENIZER.encode(PROMPT, add_special_tokens=False))


def test_answers_with_the_fields_of_openai():
    async def use(server: StoryServer):
        return await server.ok(PATH, messages=HELLO, max_completion_tokens=6, return_token_ids=True)

    body = run(use)
    assert body["id"].startswith("chatcmpl-") and body["object"] == "chat.completion"
    [choice] = body["choices"]
    assert choice["message"]["role"] == "assistant"
    assert choice["message"]["content"] == continuation(NUM_PROMPT, 6)
    assert choice["finish_reason"] == "length"
    assert body["prompt_token_ids"] == TOKENIZER.encode(PROMPT, add_special_tokens=False)
    assert body["usage"]["prompt_tokens"] == NUM_PROMPT


def test_without_a_limit_the_context_is_the_limit():
    async def use(server: StoryServer):
        return await server.ok(PATH, messages=HELLO)

    usage = run(use, max_model_len=40)["usage"]
    assert usage["total_tokens"] == 40


def test_stream_begins_with_the_role_and_has_one_end_per_choice():
    async def use(server: StoryServer):
        return await server.events(PATH, messages=HELLO, n=3, max_tokens=7)

    first, *events = run(use)
    assert [c["delta"] for c in first["choices"]] == [{"role": "assistant", "content": ""}] * 3
    texts, ends = dict.fromkeys(range(3), ""), []
    for event in events:
        assert event["object"] == "chat.completion.chunk"
        for choice in event["choices"]:
            texts[choice["index"]] += choice["delta"].get("content", "")
            ends += [choice["index"]] * (choice["finish_reason"] is not None)
    assert texts == dict.fromkeys(range(3), continuation(NUM_PROMPT, 7))
    assert sorted(ends) == [0, 1, 2]


def test_logprobs_in_chat_style():
    async def use(server: StoryServer):
        server.executor.num_logprobs = 4
        more = dict(messages=HELLO, max_tokens=3, logprobs=True)
        whole = await server.ok(PATH, top_logprobs=2, **more)
        none = await server.ok(PATH, **more)
        stream = await server.events(PATH, top_logprobs=2, **more)
        return whole, none, stream

    whole, none, stream = run(use)
    content = whole["choices"][0]["logprobs"]["content"]
    text = continuation(NUM_PROMPT, 3)
    assert [entry["token"] for entry in content] == list(text)
    assert [bytes(entry["bytes"]).decode() for entry in content] == list(text)
    for entry, token_id in zip(content, TOKENIZER.encode(text), strict=True):
        assert entry["logprob"] == -token_id
        assert [top["logprob"] for top in entry["top_logprobs"]] == [-token_id, -token_id - 1]
    assert all(e["top_logprobs"] == [] for e in none["choices"][0]["logprobs"]["content"])
    streamed = [
        entry
        for event in stream
        for choice in event["choices"]
        if choice["logprobs"]
        for entry in choice["logprobs"]["content"]
    ]
    assert streamed == content


def test_content_parts_and_continued_messages():
    async def use(server: StoryServer):
        parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
        tokens = await server.ok("/tokenize", messages=[{"role": "user", "content": parts}])
        told = [*HELLO, {"role": "assistant", "content": "once"}]
        more = dict(messages=told, max_tokens=4, add_generation_prompt=False)
        goes_on = await server.ok(PATH, continue_final_message=True, echo=True, **more)
        return tokens, goes_on

    tokens, goes_on = run(use)
    expected = "<|user|>a\nb<|end|><|assistant|>"
    assert tokens["tokens"] == TOKENIZER.encode(expected, add_special_tokens=False)
    prompt = "<|user|>hi<|end|><|assistant|>once"
    num_prompt = len(TOKENIZER.encode(prompt, add_special_tokens=False))
    message = goes_on["choices"][0]["message"]
    assert message == {
        "role": "assistant",
        "content": "once" + continuation(num_prompt, 4),
        "refusal": None,
    }


def test_templates_come_from_the_server_and_only_from_trusted_clients():
    mine = "{% for m in messages %}{{ m.content }}{% endfor %}"

    async def use(server: StoryServer):
        return await server.post("/tokenize", messages=HELLO, chat_template=mine)

    assert run(use).status_code == 400
    assert run(use, dict(trust_request_chat_template=True)).json()["count"] == 2

    async def plain(server: StoryServer):
        return await server.ok("/tokenize", messages=HELLO, chat_template_kwargs={"word": "abcd"})

    settings = dict(chat_template="{{ word }}", default_chat_template_kwargs={"word": "a"})
    assert run(plain, settings)["count"] == 4


def test_templates_that_fail_are_the_clients_fault():
    async def use(server: StoryServer):
        return await server.refused(PATH, messages=HELLO)

    for template in (
        "{{ raise_exception('roles must alternate') }}",
        "{{ 1 // 0 }}",
        "{{ messages[7].content.x }}",
        "{% if %}",
    ):
        error = run(use, dict(chat_template=template))
        assert error["param"] == "messages" and "template" in error["message"], template
    assert (
        "roles must alternate"
        in run(use, dict(chat_template="{{ raise_exception('roles must alternate') }}"))["message"]
    )


STRICT = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate user/assistant') }}{% endif %}{{ m.content }}{% endfor %}"
)


@pytest.mark.parametrize("stream", [False, True])
def test_two_user_turns_against_a_strict_template(stream):
    async def use(server: StoryServer):
        user, assistant = dict(role="user", content="once"), dict(role="assistant", content="upon")
        await server.ok(PATH, messages=[user, assistant, user])
        error = await server.refused(PATH, messages=[user, user], stream=stream)
        assert "roles must alternate" in error["message"] and error["param"] == "messages"
        assert server.llm.num_unfinished == 0

    run(use, dict(chat_template=STRICT))
