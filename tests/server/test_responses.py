"""`/v1/responses`, driven by OpenAI's client."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from typing import Any

import httpx2
import openai
import pydantic
import pytest

from jaxinfer.server.response_store import ResponseStore
from tests.server.scripted_server import Script, ScriptedServer, run

PATH = "/v1/responses"
MODEL = "scripted"
NOW = {"type": "function", "name": "now", "parameters": {"type": "object", "properties": {}}}
CALL = '<tool_call>{"name": "now", "arguments": {"a": 1}}</tool_call>'
SETTINGS = dict(enable_auto_tool_choice=True, tool_call_parser="hermes", reasoning_parser="qwen3")


def last_words(prompt: str) -> str:
    """A model that tells its prompt."""
    return prompt.removesuffix("<|assistant|>").replace("<|", "(").replace("|>", ")")


def ask(
    script: Script,
    test: Callable[[openai.AsyncOpenAI], Awaitable[Any]],
    settings: dict[str, Any] | None = None,
) -> Any:
    """The test's result, with OpenAI's client of a server of its own."""

    async def use(server: ScriptedServer) -> Any:
        transport = httpx2.ASGITransport(server.app, raise_app_exceptions=False)
        http = httpx2.AsyncClient(transport=transport, base_url="http://x/v1")
        async with openai.AsyncOpenAI(
            base_url="http://x/v1", api_key="none", max_retries=0, http_client=http
        ) as client:
            return await test(client)

    return run(script, use, SETTINGS if settings is None else settings)


def test_text_whole_and_streamed():
    async def use(client: openai.AsyncOpenAI):
        fields = dict(model=MODEL, instructions="Be brief.", input="hi", temperature=0)
        whole = await client.responses.create(**fields)
        events = [e async for e in await client.responses.create(**fields, stream=True)]
        async with client.responses.stream(**fields) as stream:
            final = await stream.get_final_response()
        return whole, events, final

    whole, events, final = ask(last_words, use)
    text = "(system)Be brief.(end)(user)hi(end)"
    assert whole.output_text == final.output_text == text
    assert whole.status == "completed" and whole.output[0].type == "message"
    assert whole.usage.output_tokens == len(text) + 1
    assert whole.usage.total_tokens == whole.usage.input_tokens + len(text) + 1
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type.removeprefix("response.") for event in events]
    assert list(dict.fromkeys(kinds)) == [
        "created", "in_progress", "output_item.added", "content_part.added", "output_text.delta",
        "output_text.done", "content_part.done", "output_item.done", "completed",
    ]  # fmt: skip
    assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == text
    assert events[-1].response.usage == whole.usage
    added = next(e for e in events if e.type == "response.output_item.added")
    assert added.item.status == "in_progress" and not added.item.content


def test_thoughts_text_and_calls_are_items():
    script = f"<think>\nHm.\n</think>\n\nLet me see. {CALL}{CALL}"

    async def use(client: openai.AsyncOpenAI):
        fields = dict(model=MODEL, input="hi", tools=[NOW], reasoning={"effort": "low"})
        whole = await client.responses.create(**fields)
        async with client.responses.stream(**fields) as stream:
            kinds = [event.type async for event in stream]
            return whole, await stream.get_final_response(), kinds

    whole, final, kinds = ask(script, use)
    for response in (whole, final):
        thoughts, text, *calls = response.output
        assert thoughts.type == "reasoning" and thoughts.content[0].text == "Hm."
        assert text.content[0].text == "Let me see."
        assert [(c.type, c.name, c.arguments) for c in calls] == [
            ("function_call", "now", '{"a": 1}')
        ] * 2
        assert len({call.call_id for call in calls}) == 2
        assert {item.status for item in response.output} == {"completed"}
        assert response.usage.output_tokens_details.reasoning_tokens == 7
    for kind in ("reasoning_text.delta", "reasoning_text.done", "function_call_arguments.done"):
        assert f"response.{kind}" in kinds


def test_conversations_go_on_from_stored_responses():
    def script(prompt: str) -> str:
        return CALL if "noon" not in prompt else last_words(prompt)

    async def use(client: openai.AsyncOpenAI):
        fields = dict(model=MODEL, tools=[NOW])
        first = await client.responses.create(**fields, input="when?", instructions="Be brief.")
        output = {
            "type": "function_call_output",
            "call_id": first.output[0].call_id,
            "output": "noon",
        }
        by_id = await client.responses.create(
            **fields, input=[output], previous_response_id=first.id
        )
        turn = [{"role": "user", "content": "when?"}, *[o.model_dump() for o in first.output]]
        by_items = await client.responses.create(**fields, input=[*turn, output], store=False)
        assert (await client.responses.retrieve(by_id.id)).output_text == by_id.output_text
        await client.responses.delete(by_id.id)
        for call in (
            client.responses.retrieve(by_id.id),
            client.responses.retrieve(by_items.id),
            client.responses.delete("resp_x"),
            client.responses.create(**fields, input="x", previous_response_id=by_id.id),
        ):
            with pytest.raises(openai.NotFoundError, match="There is no response"):
                await call
        return by_id, by_items

    by_id, by_items = ask(script, use)
    told = '(user)when?(end)(assistant)now{"a": 1}(end)(tool)noon(end)'
    # Instructions are those of their request only.
    assert (
        by_id.output_text
        == by_items.output_text
        == f"(system){json.dumps(_chat_tool())}(end)" + told
    )


def _chat_tool() -> list[dict[str, Any]]:
    return [{"type": "function", "function": {k: v for k, v in NOW.items() if k != "type"}}]


def test_a_server_without_a_store_says_so():
    async def use(client: openai.AsyncOpenAI):
        answer = await client.responses.create(model=MODEL, input="hi")
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(answer.id)
        return answer.store

    assert ask("x", use, dict(max_stored_responses=0)) is False


class City(pydantic.BaseModel):
    name: str = pydantic.Field(pattern="^[A-Z]{2}$")
    size: int


def test_structured_outputs_calls_on_demand_and_cut_outputs():
    async def use(client: openai.AsyncOpenAI):
        fields = dict(model=MODEL, input="hi")
        parsed = await client.responses.parse(**fields, text_format=City, max_output_tokens=60)
        choice = {"type": "function", "name": "now"}
        called = await client.responses.create(**fields, tools=[NOW], tool_choice=choice)
        cut = await client.responses.create(**fields, max_output_tokens=3)
        return parsed, called, cut

    parsed, called, cut = ask("A word.", use, {})
    assert isinstance(parsed.output_parsed, City)
    assert [item.name for item in called.output] == ["now"]
    assert cut.status == "incomplete" and cut.incomplete_details.reason == "max_output_tokens"
    assert cut.output_text == "A w" and cut.output[0].status == "incomplete"


REFUSED = [
    ("input", dict(input=[])),
    ("input", dict(input=[{"type": "image_generation_call"}])),
    ("input", dict(input=[{"role": "cook", "content": "x"}])),
    ("input", dict(input=[{"role": "user", "content": [{"type": "input_image"}]}])),
    ("input", dict(input=[{"type": "function_call_output", "output": "x"}])),
    ("input", dict(input=[{"type": "function_call", "call_id": "1", "name": "f", "arguments": "{"}])),
    ("max_output_tokens", dict(max_output_tokens=0)),
    ("max_output_tokens", dict(max_output_tokens=4000)),
    ("temperature", dict(temperature=-1)),
    ("tools", dict(tools=[{"type": "web_search"}])),
    ("tool_choice", dict(tools=[NOW], tool_choice={"type": "function", "name": "f"})),
    ("text", dict(text={"format": {"type": "yaml"}})),
    ("text", dict(text={"format": {"type": "json_schema", "name": "x", "schema": {"$ref": "#"}}})),
    ("truncation", dict(truncation="auto")),
    ("include", dict(include=["message.output_text.logprobs"])),
    ("background", dict(background=True)),
    ("top_logprobs", dict(top_logprobs=3)),
    ("conversation", dict(conversation="conv_1")),
    ("reasoning", dict(reasoning={"effort": 3})),
    ("chat_template", dict(chat_template="x")),
]  # fmt: skip


def test_what_is_not_supported_is_refused_by_name():
    async def use(server: ScriptedServer):
        for param, fields in REFUSED:
            error = await server.refused(PATH, **{"input": "hi"} | fields)
            assert error["param"] == param, (fields, error)
        await server.refused(PATH, 404, input="hi", model="gpt-4")
        neutral = dict(background=False, user="me", top_logprobs=None, max_tool_calls=None)
        await server.ok(PATH, input="hi", **neutral, top_k=1)

    run("x", use, SETTINGS)


def test_an_error_in_a_stream_is_its_last_event():
    async def use(server: ScriptedServer):
        server.executor.is_invalid = lambda context: len(context) > 30
        return (await server.post(PATH, input="hi", stream=True)).text

    first, *_, last = run("a" * 99, use, SETTINGS).strip().split("\n\n")
    assert first.startswith("event: response.created\ndata: {")
    event, data = last.split("\n")
    assert event == "event: error" and json.loads(data[6:])["code"] == "server_error"


def test_the_store_forgets_the_oldest():
    store = ResponseStore(max_count=3, max_bytes=1000)
    for id in "abc":
        store.put(id, {"id": id}, [])
    assert store.get("a") is not None
    store.put("d", {"id": "d"}, [])
    assert [store.get(id) is not None for id in "abcd"] == [True, False, True, True]
    store.put("e", {"id": "e" * 980}, [])
    assert len(store) == 1 and store.get("e") is not None
    store.put("f", {"id": "f" * 2000}, [])
    assert len(store) == 0
    store.put("a", {"id": "a"}, [])
    assert store.remove("a") and not store.remove("a")
