"""`use_beam_search`: what the endpoints make of it; the search itself is tested with the engine."""

from __future__ import annotations

import asyncio

import pytest

from jaxinfer import BeamSearchParams
from tests.frontend.story_engine import TOKENIZER
from tests.server.story_server import StoryServer, run

TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
HELLO = [{"role": "user", "content": "hi"}]


def scored(server: StoryServer) -> None:
    """The fake device says minus the token's id of the next one, and of those after it: the story is the likeliest."""
    server.executor.num_logprobs = 8


def test_n_beams_of_each_prompt_best_first_as_the_engine_finds_them():
    async def use(server: StoryServer):
        scored(server)
        body = await server.ok(
            TEXT,
            prompt=["once", "a"],
            use_beam_search=True,
            n=3,
            max_tokens=4,
            length_penalty=0.5,
            return_token_ids=True,
        )
        params = BeamSearchParams(3, 4, length_penalty=0.5)
        return body, [await server.llm.beam_search(prompt, params) for prompt in ("once", "a")]

    body, found = run(use)
    assert [choice["index"] for choice in body["choices"]] == list(range(6))
    expected = [(i, s) for i, one in enumerate(found) for s in one.sequences]
    for choice, (i, sequence) in zip(body["choices"], expected, strict=True):
        prompt = TOKENIZER.encode(["once", "a"][i])
        assert choice["text"] == sequence.text and choice["prompt_token_ids"] == prompt
        assert prompt + choice["token_ids"] == sequence.tokens
        assert choice["finish_reason"] == "length" and choice["logprobs"] is None
    assert len({choice["text"] for choice in body["choices"][:3]}) == 3
    assert body["usage"]["completion_tokens"] == 2 * 3 * 4
    assert body["usage"]["prompt_tokens"] == 5


def test_chat_answers_with_beams():
    async def use(server: StoryServer):
        scored(server)
        fields = dict(messages=HELLO, use_beam_search=True, max_completion_tokens=5)
        two = await server.ok(CHAT, n=2, **fields)
        one = await server.ok(CHAT, **fields)
        await server.until_idle()
        return two, one

    two, one = run(use)
    first, second = (choice["message"]["content"] for choice in two["choices"])
    assert len(first) == len(second) == 5 and first != second
    assert len(one["choices"]) == 1 and one["usage"]["completion_tokens"] == 5


@pytest.mark.parametrize(
    ("param", "fields"),
    [
        ("stream", dict(stream=True)),
        ("logprobs", dict(logprobs=1)),
        ("stop", dict(stop="x")),
        ("logit_bias", dict(logit_bias={"3": 1})),
        ("guided_regex", dict(guided_regex="a")),
        ("n", dict(n=11)),
        ("n", dict(n=0)),
        ("length_penalty", dict(length_penalty=1000)),
        ("max_tokens", dict(max_tokens=500)),
        ("prompt", dict(prompt="")),
    ],
)
def test_refused(param, fields):
    async def use(server: StoryServer):
        body = dict(prompt="once", use_beam_search=True) | fields
        error = await server.refused(TEXT, **body)
        assert server.executor.plans == []
        return error

    assert run(use)["param"] == param


def test_a_client_that_leaves_ends_the_search():
    async def use(server: StoryServer):
        scored(server)
        search = asyncio.ensure_future(server.llm.beam_search("once", BeamSearchParams(4, 100)))
        while not server.executor.plans:
            await asyncio.sleep(0)
        search.cancel()
        await server.until_idle()
        free = server.num_free_blocks
        return free

    assert run(use) == 399
