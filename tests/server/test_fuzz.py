"""Whatever JSON a client sends, the server is not at fault, and goes on."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jaxinfer.server.protocol.anthropic import MessagesRequest
from jaxinfer.server.protocol.chat import ChatCompletionRequest
from jaxinfer.server.protocol.completion import CompletionRequest
from jaxinfer.server.protocol.responses import ResponsesRequest
from tests.server.story_server import StoryServer, run

JUNK = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-3, 130)
    | st.integers()
    | st.floats()
    | st.sampled_from(["", "once", "left", "text", "\ud800", "assistant"])
    | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3)
    ),
    max_leaves=6,
)
PROMPTS = st.text(alphabet="once upon", max_size=12)
PLAUSIBLE: dict[str, st.SearchStrategy[Any]] = {
    "max_tokens": st.integers(1, 40),
    "max_completion_tokens": st.integers(1, 40),
    "n": st.integers(1, 4),
    "temperature": st.floats(0, 2),
    "logprobs": st.integers(0, 20) | st.booleans(),
    "top_logprobs": st.integers(0, 20),
    "prompt_logprobs": st.integers(0, 20),
    "logprob_token_ids": st.lists(st.integers(0, 49), max_size=4),
    "use_beam_search": st.booleans(),
    "length_penalty": st.floats(-2, 2),
    "echo": st.booleans(),
    "stream": st.booleans(),
    "stop": st.lists(st.text(alphabet="once upo", max_size=3), max_size=3),
    "truncate_prompt_tokens": st.integers(1, 10),
    "return_token_ids": st.booleans(),
    "continue_final_message": st.booleans(),
    "add_generation_prompt": st.booleans(),
    "allowed_token_ids": st.lists(st.integers(0, 49), max_size=4),
    "bad_words": st.lists(st.text(alphabet="once ", max_size=4), max_size=3),
    "logit_bias": st.dictionaries(st.integers(0, 49).map(str), st.floats(-200, 200), max_size=3),
    "tools": st.lists(
        st.fixed_dictionaries(
            {"type": st.just("function")},
            optional={
                "function": st.fixed_dictionaries({"name": st.just("f")}) | JUNK,
                "name": st.just("f"),
                "parameters": JUNK,
            },
        ),
        max_size=2,
    ),
    "tool_choice": st.sampled_from(["none", "auto", "required", {"type": "any"}]),
    "instructions": PROMPTS,
    "system": PROMPTS,
    "max_output_tokens": st.integers(1, 40),
}
BLOCKS = st.lists(
    st.fixed_dictionaries(
        {"type": st.sampled_from(["text", "tool_use", "tool_result", "thinking", "image"])},
        optional={
            "text": PROMPTS,
            "name": PROMPTS,
            "id": PROMPTS,
            "tool_use_id": PROMPTS,
            "input": JUNK,
            "content": PROMPTS | JUNK,
        },
    ),
    max_size=3,
)
ITEMS = st.lists(
    st.fixed_dictionaries(
        {},
        optional={
            "type": st.sampled_from(
                ["message", "function_call", "function_call_output", "reasoning"]
            ),
            "role": st.sampled_from(["user", "assistant", "developer"]),
            "content": PROMPTS | JUNK,
            "call_id": PROMPTS,
            "name": PROMPTS,
            "arguments": st.just("{}") | JUNK,
            "output": PROMPTS | JUNK,
        },
    ),
    max_size=4,
)
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "assistant", "system"]), "content": PROMPTS}
    ),
    min_size=1,
    max_size=3,
)


def bodies(model: type, required: str, good: st.SearchStrategy[Any]) -> st.SearchStrategy[dict]:
    """A required field that is mostly good, and a few others, each plausible or junk."""
    # Of a short timeout, 504 is the right answer.
    others = set(model.model_fields) - {required, "model", "timeout"}
    junk = st.tuples(st.sampled_from(sorted(others)), JUNK)
    plausible = st.sampled_from(sorted(set(model.model_fields) & PLAUSIBLE.keys())).flatmap(
        lambda name: st.tuples(st.just(name), PLAUSIBLE[name])
    )
    field = plausible | plausible | plausible | junk
    rest = st.lists(field, max_size=4).map(dict)
    return st.builds(lambda value, rest: {required: value} | rest, good | good | good | JUNK, rest)


def test_no_json_is_a_server_error():
    async def use(server: StoryServer) -> None:
        server.executor.num_logprobs = 20
        server.executor.prompt_logprobs = True
        loop = asyncio.get_running_loop()
        statuses: Counter[int] = Counter()

        async def post(path: str, body: dict[str, Any]) -> None:
            async with asyncio.timeout(20):
                response = await server.post(path, **body)
            assert response.status_code in (200, 400), (path, body, response.text)
            assert "server_error" not in response.text and "api_error" not in response.text, (
                path,
                body,
            )
            statuses[response.status_code] += 1

        def send(path: str, body: dict[str, Any]) -> None:
            asyncio.run_coroutine_threadsafe(post(path, body), loop).result(30)

        calm = settings(
            max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow]
        )

        @calm
        @given(bodies(CompletionRequest, "prompt", PROMPTS))
        def completions(body: dict[str, Any]) -> None:
            send("/v1/completions", body)

        @calm
        @given(bodies(ChatCompletionRequest, "messages", MESSAGES))
        def chats(body: dict[str, Any]) -> None:
            send("/v1/chat/completions", body)

        @calm
        @given(bodies(ResponsesRequest, "input", PROMPTS | ITEMS))
        def responses(body: dict[str, Any]) -> None:
            send("/v1/responses", body)

        turns = st.lists(
            st.fixed_dictionaries(
                {"role": st.sampled_from(["user", "assistant"]), "content": PROMPTS | BLOCKS}
            ),
            min_size=1,
            max_size=3,
        )

        @calm
        @given(bodies(MessagesRequest, "messages", turns))
        def messages(body: dict[str, Any]) -> None:
            send("/v1/messages", {"max_tokens": 5} | body)

        for fuzz in (completions, chats, responses, messages):
            await asyncio.to_thread(fuzz)
        await server.until_idle()
        await server.ok("/v1/completions", prompt="once")
        assert statuses[200] > 30 and statuses[400] > 30, statuses

    run(use)
