"""Thoughts over HTTP, with tool calls and structured outputs after them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.server.scripted_server import TOKENIZER, ScriptedServer, calls_of, run

CHAT = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "hi"}]
QWEN = dict(reasoning_parser="qwen3")
R1 = dict(reasoning_parser="deepseek_r1")
TOOLS = [{"type": "function", "function": {"name": "now"}}]
CLOSED = dict(chat_template_kwargs={"closed": True})
"""The template ends the thoughts before they begin."""


def both(script: str | None, settings: dict[str, Any], **body: Any) -> dict[str, Any]:
    """The choice, which is the same whether it is streamed."""

    async def use(server: ScriptedServer):
        fields = dict(messages=HELLO, **body)
        return await server.message(**fields), await server.streamed(**fields)

    whole, streamed = run(script, use, settings)
    for key in ("reasoning", "content"):
        assert (whole["message"].get(key) or "") == streamed["message"].get(key, "")
    assert calls_of(whole) == calls_of(streamed)
    assert whole["finish_reason"] == streamed["finish_reason"]
    return whole


def test_thoughts_are_a_field_of_their_own():
    message = both("<think>\nHm.\n</think>\n\nYes.", QWEN)["message"]
    assert (message["reasoning"], message["content"]) == ("Hm.", "Yes.")
    assert both("Yes.", QWEN)["message"]["reasoning"] is None
    assert both("Hm.</think>Yes.", R1)["message"]["reasoning"] == "Hm."
    message = both("Hm.</think>Yes.", R1, include_reasoning=False)["message"]
    assert not message["reasoning"] and message["content"] == "Yes."
    message = both("Yes </think> no.", R1, **CLOSED)["message"]
    assert not message["reasoning"] and message["content"] == "Yes </think> no."


def test_usage_counts_thoughts():
    async def use(server: ScriptedServer):
        body = dict(messages=HELLO, stream_options={"include_usage": True})
        events = await server.events(CHAT, **body)
        return (await server.ok(CHAT, messages=HELLO))["usage"], events[-1]["usage"]

    usage, streamed = run("<think>Hm.</think>Yes.", use, QWEN)
    assert usage == streamed
    assert usage["completion_tokens_details"] == {"reasoning_tokens": 5}


def test_a_budget_ends_the_thoughts():
    script = "<think>aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa"
    for budget in (0, 3):
        message = both(script, QWEN, thinking_token_budget=budget, max_tokens=20)["message"]
        assert (message["reasoning"] or "") == "a" * budget
        assert message["content"] == "a" * (20 - budget - 2)

    async def use(server: ScriptedServer):
        return await server.refused(CHAT, messages=HELLO, thinking_token_budget=3)

    assert run("x", use)["param"] == "thinking_token_budget"


@pytest.mark.parametrize(
    ("script", "settings", "reasoning"),
    [
        ("<think>Hm {1} <|end|> so.</think>Answer", QWEN, "Hm {1}"),
        ("Answer", QWEN, ""),
        ("Hm {1} so.</think>Answer", R1, "Hm {1} so."),
    ],
)
def test_grammars_begin_after_the_thoughts(script: str, settings: dict[str, Any], reasoning: str):
    """The masks turn the answer, and an end before the answer, into something else."""
    schema = {"type": "object", "properties": {"a": {"type": "integer", "maximum": 9}}}
    schema |= {"required": ["a"], "additionalProperties": False}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    body = dict(max_tokens=200, thinking_token_budget=100)
    message = both(script, settings, response_format=form, **body)["message"]
    assert (message["reasoning"] or "").startswith(reasoning)
    assert bool(message["reasoning"]) == bool(reasoning)
    assert isinstance(json.loads(message["content"])["a"], int)
    choice = both(
        script, settings, tools=TOOLS, tool_choice="required", parallel_tool_calls=False, **body
    )
    assert choice["message"]["reasoning"] == message["reasoning"]
    assert {name for name, _ in calls_of(choice)} == {"now"}
    assert choice["finish_reason"] == "tool_calls"
    message = both("text", settings, response_format=form, max_tokens=40, **CLOSED)["message"]
    assert not message["reasoning"] and isinstance(json.loads(message["content"])["a"], int)


def test_calls_of_the_models_own_choice_come_after_the_thoughts():
    call = '<tool_call>{"name": "now", "arguments": {}}</tool_call>'
    settings = QWEN | dict(enable_auto_tool_choice=True, tool_call_parser="hermes")
    choice = both(f"<think>{call}?</think>\n\nSo: {call}", settings, tools=TOOLS)
    assert choice["message"]["reasoning"] == f"{call}?"
    assert choice["message"]["content"] == "So:" and calls_of(choice) == [("now", {})]


def test_messages_and_efforts_reach_the_template():
    template = "{{ messages[0].reasoning_content }}{{ reasoning_effort }}{{ enable_thinking }}<|assistant|>"

    async def use(server: ScriptedServer):
        told = [{"role": "assistant", "content": "a", "reasoning": "b"}]
        body = dict(messages=told, max_tokens=1, return_token_ids=True, reasoning_effort="none")
        return TOKENIZER.decode((await server.ok(CHAT, **body))["prompt_token_ids"], False)

    assert run("x", use, dict(chat_template=template)) == "bnoneFalse<|assistant|>"


def test_a_model_without_the_tokens_is_refused():
    from tests.server import story_server

    async def use(server: object):
        raise AssertionError("unreachable")

    with pytest.raises(ValueError, match="vocabularies hold <think> and </think>"):
        story_server.run(use, QWEN)
