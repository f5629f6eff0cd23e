"""`/v1/messages`, driven by Anthropic's client."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from typing import Any

import httpx2
import pytest

from tests.server.scripted_server import Script, ScriptedServer, run

anthropic = pytest.importorskip("anthropic")

PATH = "/v1/messages"
HELLO = [{"role": "user", "content": "hi"}]
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer", "maximum": 9}},
    "required": ["a"],
}
NOW = {"name": "now", "description": "The time", "input_schema": SCHEMA}
CALL = '<tool_call>{"name": "now", "arguments": {"a": 1}}</tool_call>'
SETTINGS = dict(enable_auto_tool_choice=True, tool_call_parser="hermes", reasoning_parser="qwen3")
BASIC = dict(model="scripted", max_tokens=300, messages=HELLO)


def last_words(prompt: str) -> str:
    """A model that tells its prompt."""
    return prompt.removesuffix("<|assistant|>").replace("<|", "(").replace("|>", ")")


def ask(
    script: Script,
    test: Callable[[Any], Awaitable[Any]],
    settings: dict[str, Any] | None = None,
    key: str = "none",
) -> Any:
    """The test's result, with Anthropic's client of a server of its own."""

    async def use(server: ScriptedServer) -> Any:
        transport = httpx2.ASGITransport(server.app, raise_app_exceptions=False)
        http = httpx2.AsyncClient(transport=transport, base_url="http://x")
        async with anthropic.AsyncAnthropic(
            base_url="http://x", api_key=key, max_retries=0, http_client=http
        ) as client:
            return await test(client)

    return run(script, use, SETTINGS | (settings or {}))


async def both(client: Any, **fields: Any) -> list[Any]:
    """The message, whole and put together by the client's helper for streams."""
    async with client.messages.stream(**BASIC | fields) as stream:
        streamed = await stream.get_final_message()
    return [await client.messages.create(**BASIC | fields), streamed]


def test_text_whole_and_streamed():
    async def use(client: Any):
        counted = await client.messages.count_tokens(
            model="scripted", messages=HELLO, system="Be brief."
        )
        stream = await client.messages.create(**BASIC, stream=True)
        return await both(client, system=[{"type": "text", "text": "Be brief."}]), counted, [
            event.type async for event in stream
        ]  # fmt: skip

    messages, counted, events = ask(last_words, use)
    text = "(system)Be brief.(end)(user)hi(end)"
    for message in messages:
        assert message.role == "assistant" and message.id.startswith("msg_")
        assert [(block.type, block.text) for block in message.content] == [("text", text)]
        assert message.stop_reason == "end_turn" and message.stop_sequence is None
        usage = message.usage
        assert usage.output_tokens == len(text) + 1
        assert usage.input_tokens + usage.cache_read_input_tokens == counted.input_tokens
    assert list(dict.fromkeys(events)) == [
        "message_start", "content_block_start", "content_block_delta",
        "content_block_stop", "message_delta", "message_stop",
    ]  # fmt: skip


def test_thoughts_text_and_calls_are_blocks():
    script = f"<think>\nHm.\n</think>\n\nLet me see. {CALL}{CALL}"

    async def use(client: Any):
        one = {"type": "auto", "disable_parallel_tool_use": True}
        return await both(client, tools=[NOW]), await both(client, tools=[NOW], tool_choice=one)

    several, single = ask(script, use)
    for message in several:
        thoughts, text, *calls = message.content
        assert (thoughts.type, thoughts.thinking) == ("thinking", "Hm.")
        assert text.text == "Let me see."
        assert [(c.type, c.name, c.input) for c in calls] == [("tool_use", "now", {"a": 1})] * 2
        assert message.stop_reason == "tool_use"
    for message in single:
        assert [block.type for block in message.content] == ["thinking", "text", "tool_use"]


def test_a_conversation_with_results_and_thoughts():
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "when?"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Hm.", "signature": ""},
                {"type": "text", "text": "See:"},
                {"type": "tool_use", "id": "1", "name": "now", "input": {"a": 1}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "1", "content": [{"type": "text", "text": "noon"}]},
                {"type": "text", "text": "so?"},
            ],
        },
    ]  # fmt: skip

    async def use(client: Any):
        return await client.messages.create(**BASIC | dict(messages=messages))

    told = '(user)when?(end)(assistant)See:now{"a": 1}(end)(tool)noon(end)(user)so?(end)'
    assert ask(last_words, use).content[0].text == told


def test_calls_on_demand_stop_sequences_and_limits():
    async def use(client: Any):
        one = {"type": "any", "disable_parallel_tool_use": True}
        choices = (one, {"type": "tool", "name": "now"})
        called = [m for c in choices for m in await both(client, tools=[NOW], tool_choice=c)]
        stopped = await both(client, stop_sequences=["word", "zebra"])
        cut = await both(client, max_tokens=3)
        form = {
            "format": {"type": "json_schema", "schema": SCHEMA | {"additionalProperties": False}}
        }
        structured = await both(client, output_config=form)
        return called, stopped, cut, structured

    called, stopped, cut, structured = ask("A word.", use, {"reasoning_parser": None})
    for message in called:
        [call] = message.content
        assert call.name == "now" and isinstance(call.input["a"], int)
        assert message.stop_reason == "tool_use"
    for message in stopped:
        assert message.content[0].text == "A "
        assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "word")
    for message in cut:
        assert (message.content[0].text, message.stop_reason) == ("A w", "max_tokens")
    for message in structured:
        assert isinstance(json.loads(message.content[0].text)["a"], int)


def test_thinking_is_bounded_and_can_be_switched_off():
    template = "<|assistant|>{% if enable_thinking is false %}<think>\n</think>{% endif %}"

    async def use(client: Any):
        enabled = {"type": "enabled", "budget_tokens": 4}
        budget = await both(client, thinking=enabled, max_tokens=20)
        off = await both(client, thinking={"type": "disabled"}, max_tokens=20)
        return budget, off

    budget, off = ask("<think>" + "a" * 99, use, dict(chat_template=template))
    for message in budget:
        assert message.content[0].thinking == "aaaa" and message.content[1].text == "a" * 14
    for message in off:
        assert [block.type for block in message.content] == ["text"]


def test_a_call_that_breaks_off_is_no_call():
    async def use(client: Any):
        return await client.messages.create(**BASIC | dict(max_tokens=len(CALL) - 16, tools=[NOW]))

    message = ask(CALL, use)
    assert message.stop_reason == "max_tokens" and not message.content


REFUSED = [
    ("messages", dict(messages=[])),
    (r"messages\[0\]\.role", dict(messages=[{"role": "cook", "content": "x"}])),
    (r"messages\[0\]\.content\[0\]\.type: 'image'",
     dict(messages=[{"role": "user", "content": [{"type": "image"}]}])),
    (r"messages\[0\]\.content\[0\]\.tool_use_id",
     dict(messages=[{"role": "user", "content": [{"type": "tool_result"}]}])),
    ("max_tokens", dict(max_tokens=0)),
    ("max_tokens", dict(max_tokens=4000)),
    ("temperature", dict(temperature=-1)),
    ("stop_sequences", dict(stop_sequences=[""])),
    (r"system\[0\]", dict(system=[{"type": "image"}])),
    (r"tools\[0\]\.type", dict(tools=[{"type": "web_search_20250305", "name": "x"}])),
    ("'f', which is not among", dict(tools=[NOW], tool_choice={"type": "tool", "name": "f"})),
    (r"tool_choice\.type", dict(tools=[NOW], tool_choice={"type": "some"})),
    (r"thinking\.type", dict(thinking={"type": "loud"})),
    (r"thinking", dict(thinking={"type": "enabled", "budget_tokens": -1})),
    ("output_config", dict(output_config={"format": {"type": "yaml"}})),
    ("mcp_servers", dict(mcp_servers=[{"url": "x"}])),
]  # fmt: skip


def test_errors_have_the_shape_of_the_api():
    async def use(server: ScriptedServer):
        async def refused(status: int, path: str = PATH, **fields: Any) -> dict[str, Any]:
            response = await server.post(path, **BASIC | fields)
            assert response.status_code == status, (fields, response.text)
            body = response.json()
            assert body.keys() == {"type", "error"} and body["type"] == "error"
            return body["error"]

        for message, fields in REFUSED:
            error = await refused(400, **fields)
            assert error["type"] == "invalid_request_error"
            with pytest.raises(AssertionError, match=message):
                raise AssertionError(error["message"])
        assert (await refused(404, model="x"))["type"] == "not_found_error"
        assert (await refused(404, f"{PATH}/nothing"))["type"] == "not_found_error"
        assert (await refused(413, system="x" * 5000))["type"] == "request_too_large"
        server.executor.is_invalid = lambda context: len(context) > 20
        stream = await server.post(PATH, **BASIC, stream=True)
        event, data = stream.text.strip().split("\n\n")[-1].split("\n")
        assert event == "event: error" and json.loads(data[6:])["error"]["type"] == "api_error"

    run("a" * 99, use, SETTINGS | dict(max_body_bytes=4000))


def test_keys_as_the_client_sends_them():
    async def use(client: Any):
        return (await client.messages.create(**BASIC)).content[0].text

    assert ask("yes", use, dict(api_key=("first", "second")), key="second") == "yes"
    with pytest.raises(anthropic.AuthenticationError, match="API keys"):
        ask("yes", use, dict(api_key=("first",)), key="guess")
