"""Tool calls over HTTP: what the model is told, what it may write, and what clients get of it."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest

from tests.server.scripted_server import TOKENIZER, ScriptedServer, calls_of, run

CHAT = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "hi"}]


def tool(name: str, **properties: Any) -> dict[str, Any]:
    schema = dict(type="object", properties=properties, required=sorted(properties))
    return {"type": "function", "function": {"name": name, "parameters": schema}}


WORD = {"type": "string", "maxLength": 5, "pattern": "^[a-z]+$"}
NESTED = tool("nested", place={"$ref": "#/$defs/Place"})
NESTED["function"]["parameters"]["$defs"] = {
    "Place": dict(type="object", properties={"x": {"enum": [1, 2]}}, required=["x"])
}
TOOLS = [tool("weather", city=WORD, days={"type": "integer", "minimum": 1, "maximum": 9}), NESTED]
TOOLS.append({"type": "function", "function": {"name": "now"}})
SCHEMAS = {t["function"]["name"]: t["function"].get("parameters", {}) for t in TOOLS}
CALLS = [("weather", {"city": "rome", "days": 3}), ("now", {})]
HERMES = "Let me see. " + "\n".join(
    f"<tool_call>{json.dumps({'name': name, 'arguments': given})}</tool_call>"
    for name, given in CALLS
)
AUTO = dict(enable_auto_tool_choice=True, tool_call_parser="hermes")


def test_calls_of_the_models_own_choice():
    async def use(server: ScriptedServer):
        body = dict(messages=HELLO, tools=TOOLS)
        more = dict(body, parallel_tool_calls=False)
        return (
            [await server.message(**body), await server.streamed(**body)],
            [await server.message(**more), await server.streamed(**more)],
            await server.message(**body, tool_choice="none"),
            await server.message(**body, max_tokens=len(HERMES) - 60),
        )

    all_calls, one_call, none, cut = run(HERMES, use, AUTO)
    for choice in all_calls:
        assert calls_of(choice) == CALLS and choice["message"]["content"] == "Let me see."
    for choice in one_call:
        assert calls_of(choice) == CALLS[:1]
    assert {choice["finish_reason"] for choice in all_calls + one_call} == {"tool_calls"}
    assert none["message"]["content"] == HERMES and none["finish_reason"] == "stop"
    assert cut["finish_reason"] == "length"
    [call] = cut["message"]["tool_calls"]
    assert json.dumps(CALLS[0][1]).startswith(call["function"]["arguments"])


def test_without_calls_the_message_is_what_the_model_writes():
    async def use(server: ScriptedServer):
        body = dict(messages=HELLO, tools=TOOLS)
        return await server.message(**body), await server.streamed(**body)

    for choice in run("No tool can do that.\n", use, AUTO):
        assert choice["message"]["content"] == "No tool can do that.\n"
        assert "tool_calls" not in choice["message"] and choice["finish_reason"] == "stop"


def test_marks_that_are_special_tokens_reach_the_parser():
    async def use(server: ScriptedServer):
        return await server.message(messages=HELLO, tools=TOOLS)

    settings = AUTO | {"tool_call_parser": "mistral"}
    choice = run('[TOOL_CALLS]now[ARGS]{"a": 1}', use, settings)
    assert calls_of(choice) == [("now", {"a": 1})] and not choice["message"]["content"]


@pytest.mark.parametrize("stream", [False, True])
def test_noise_that_has_to_call_calls(stream: bool):
    """A model that has no idea of JSON, at the mercy of the masks."""

    async def use(server: ScriptedServer):
        ask = server.streamed if stream else server.message
        body = dict(messages=HELLO, tools=TOOLS, max_tokens=1400)
        one = dict(body, parallel_tool_calls=False)
        named = {"type": "function", "function": {"name": "nested"}}
        return (
            [await ask(**body, tool_choice="required") for _ in range(5)],
            [await ask(**one, tool_choice="required") for _ in range(5)],
            [await ask(**body, tool_choice=named) for _ in range(5)],
        )

    many, single, named = run(None, use)
    for choice in many + single + named:
        assert choice["finish_reason"] == ("stop" if choice in named else "tool_calls")
        assert calls_of(choice)
        for name, arguments in calls_of(choice):
            jsonschema.Draft202012Validator(SCHEMAS[name]).validate(arguments)
    assert max(len(calls_of(choice)) for choice in many) > 1
    assert all(len(calls_of(choice)) == 1 for choice in single)
    assert {calls_of(choice)[0][0] for choice in named} == {"nested"}


def test_an_answer_of_some_form_or_calls():
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}
    form = {
        "type": "json_schema",
        "json_schema": {"schema": schema | {"additionalProperties": False}},
    }

    async def use(server: ScriptedServer):
        body = dict(messages=HELLO, tools=TOOLS, response_format=form, max_tokens=400)
        bad = {"type": "json_schema", "json_schema": {"schema": {"$ref": "#"}}}
        assert (await server.refused(CHAT, **body | {"response_format": bad}))[
            "param"
        ] == "response_format"
        return await server.message(**body), await server.streamed(**body)

    for choice in run("A word.", use, AUTO):
        assert json.loads(choice["message"]["content"])["a"] in (1, 2)
        assert choice["finish_reason"] == "stop"
    for choice in run(HERMES.removeprefix("Let me see. "), use, AUTO):
        assert calls_of(choice) == CALLS and choice["finish_reason"] == "tool_calls"


def test_what_the_template_is_told():
    told = [
        *HELLO,
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {"id": "1", "type": "function", "function": {"name": "now", "arguments": '{"a":1}'}}
            ],
        },
        {"role": "tool", "tool_call_id": "1", "content": "noon"},
    ]
    conversation = (
        '<|user|>hi<|end|><|assistant|>now{"a": 1}<|end|><|tool|>noon<|end|><|assistant|>'
    )
    with_tools = f"<|system|>{json.dumps(TOOLS[2:])}<|end|>{conversation}"

    async def use(server: ScriptedServer):
        body = dict(messages=told, tools=TOOLS[2:], max_tokens=1, return_token_ids=True)
        counted = await server.ok("/tokenize", messages=told, tools=TOOLS[2:])
        answered = await server.ok(CHAT, **body, tool_choice="none")
        return [
            TOKENIZER.decode(ids, False)
            for ids in (counted["tokens"], answered["prompt_token_ids"])
        ]

    assert run("x", use) == [with_tools, with_tools]
    assert run("x", use, dict(exclude_tools_when_tool_choice_none=True)) == [
        with_tools,
        conversation,
    ]


def bad(**function: Any) -> dict[str, Any]:
    return dict(tools=[{"type": "function", "function": function}], tool_choice="required")


def allowed(mode: str, *names: str) -> dict[str, Any]:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


REFUSED = [
    ("tools", r"tools\[0\]\.function must be", dict(tools=[{"type": "function"}])),
    ("tools", r"tools\[0\]\.type: only 'function'", dict(tools=[{"type": "web_search"}])),
    ("tools", r"tools\[0\]\.function\.name must", bad(parameters={})),
    ("tools", r"tools\[3\]\.function\.name: 'weather'", dict(tools=[*TOOLS, TOOLS[0]])),
    ("tools", r"parameters must be a JSON schema", bad(name="f", parameters=[1])),
    ("tools", r"parameters\.type must be 'object'", bad(name="f", parameters={"type": "array"})),
    ("tools", r"parameters\.properties must be", bad(name="f", parameters={"properties": 1})),
    ("tools", r"tools\[0\]\.function\.parameters: .*end", bad(name="f", parameters={"$ref": "#"})),
    ("tools", r"tools\[0\]\.function\.parameters: .*uniqueItems",
     bad(name="f", parameters={"properties": {"a": {"type": "array", "uniqueItems": True}}})),
    ("tool_choice", r"--enable-auto-tool-choice", dict(tools=TOOLS)),
    ("tool_choice", r"--enable-auto-tool-choice", dict(tools=TOOLS, tool_choice="auto")),
    ("tool_choice", r"must be none, auto, required", dict(tools=TOOLS, tool_choice="always")),
    ("tool_choice", r"'f', which is not among", dict(tools=TOOLS, tool_choice={"function": {"name": "f"}})),
    ("tool_choice", r"must have the form", dict(tools=TOOLS, tool_choice={"type": "custom"})),
    ("tool_choice", r"must hold allowed_tools", dict(tools=TOOLS, tool_choice={"type": "allowed_tools"})),
    ("tool_choice", r"'f', which is not among", dict(tools=TOOLS, tool_choice=allowed("auto", "f"))),
    ("tool_choice", r"needs tools", dict(tool_choice="required")),
    ("tool_choice", r"exclude each other",
     dict(tools=TOOLS, tool_choice="required", structured_outputs={"json_object": True})),
    ("functions", r"use tools", dict(functions=[{"name": "f"}])),
    ("use_beam_search", r"no tools", dict(tools=TOOLS, use_beam_search=True, tool_choice="required")),
    ("messages", r"messages\[0\]\.tool_calls\[0\]\.function\.arguments is not JSON",
     dict(messages=[{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}])),
    ("messages", r"arguments must be a JSON object",
     dict(messages=[{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "3"}}]}])),
    ("messages", r"tool_calls\[0\] must have",
     dict(messages=[{"role": "assistant", "tool_calls": ["f"]}])),
]  # fmt: skip


def test_tools_that_mean_nothing_are_refused_by_name():
    async def use(server: ScriptedServer):
        for param, message, fields in REFUSED:
            error = await server.refused(CHAT, **{"messages": HELLO} | fields)
            assert error["param"] == param, (fields, error)
            with pytest.raises(AssertionError, match=message):
                raise AssertionError(error["message"])
        assert (await server.message(messages=HELLO, tool_choice="auto"))["finish_reason"] == "stop"

    run("fine", use)
