"""`/v1/responses`: OpenAI's, as far as it is about text and calls of functions."""

from __future__ import annotations

from typing import Any, ClassVar

from jaxinfer.server.errors import BadRequest
from jaxinfer.server.protocol.chat import ChatCompletionRequest
from jaxinfer.server.protocol.common import Float, Int
from jaxinfer.server.protocol.translated import (
    TranslatedRequest,
    function_call,
    joined_text,
    text_of,
    with_system_first,
)

_TEXT_PARTS = ("input_text", "output_text", "text")


class ResponsesRequest(TranslatedRequest):
    without_effect: ClassVar[frozenset[str]] = frozenset(
        {
            "client_metadata",
            "prompt_cache_key",
            "prompt_cache_options",
            "prompt_cache_retention",
            "safety_identifier",
            "service_tier",
            "stream_options",
            "user",
        }
    )
    names: ClassVar[dict[str, str]] = {
        "messages": "input",
        "max_tokens": "max_output_tokens",
        "max_completion_tokens": "max_output_tokens",
        "response_format": "text",
        "reasoning_effort": "reasoning",
    }

    model: str | None = None
    input: str | list[dict[str, Any]]
    instructions: str | None = None
    max_output_tokens: Int | None = None
    metadata: dict[str, Any] | None = None
    parallel_tool_calls: bool | None = True
    previous_response_id: str | None = None
    reasoning: dict[str, Any] | None = None
    include: list[str] | None = None
    store: bool | None = True
    stream: bool | None = False
    temperature: Float | None = None
    text: dict[str, Any] | None = None
    tool_choice: str | dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    top_p: Float | None = None
    truncation: str | None = "disabled"

    def messages(self) -> list[dict[str, Any]]:
        """What the input adds to the conversation."""
        if isinstance(self.input, str):
            return [{"role": "user", "content": self.input}]
        if not self.input:
            raise BadRequest("input must not be empty.", param="input")
        return _messages(self.input)

    def chat(self, history: list[dict[str, Any]]) -> ChatCompletionRequest:
        """The request, after the messages of the responses before. Raises `BadRequest`."""
        if self.truncation not in (None, "disabled"):
            raise BadRequest(
                f"truncation must be disabled, got {self.truncation!r:.100}.", param="truncation"
            )
        # Thoughts come as they are, and need no encryption to be sent back.
        if unknown := set(self.include or ()) - {"reasoning.encrypted_content"}:
            raise BadRequest(f"include: {min(unknown)!r:.100} is not supported.", param="include")
        return self.chat_request(
            model=self.model,
            messages=with_system_first(self.instructions, history),
            max_completion_tokens=self.max_output_tokens,
            parallel_tool_calls=self.parallel_tool_calls,
            reasoning_effort=self._effort(),
            response_format=self._response_format(),
            stream=self.stream,
            temperature=self.temperature,
            tool_choice=self._tool_choice(),
            tools=self._tools(),
            top_p=self.top_p,
        )

    def _effort(self) -> str | None:
        effort = (self.reasoning or {}).get("effort")
        if effort is not None and not isinstance(effort, str):
            raise BadRequest("reasoning.effort must be a string.", param="reasoning")
        return effort

    def _response_format(self) -> dict[str, Any] | None:
        form = (self.text or {}).get("format")
        if form is None:
            return None
        if not isinstance(form, dict):
            raise BadRequest("text.format must be an object.", param="text")
        if form.get("type") == "json_schema":
            return {"type": "json_schema", "json_schema": form}
        return form

    def _tools(self) -> list[dict[str, Any]] | None:
        if not self.tools:
            return None
        for i, tool in enumerate(self.tools):
            if tool.get("type") != "function":
                raise BadRequest(
                    f"tools[{i}].type: only 'function' is supported, got {tool.get('type')!r:.100}.",
                    param="tools",
                )
        kept = ("name", "description", "parameters", "strict")
        return [
            {"type": "function", "function": {k: tool[k] for k in kept if tool.get(k) is not None}}
            for tool in self.tools
        ]

    def _tool_choice(self) -> str | dict[str, Any] | None:
        choice = self.tool_choice
        if isinstance(choice, dict) and choice.get("type") == "function":
            return {"type": "function", "function": {"name": choice.get("name")}}
        return choice


def _messages(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Items of one turn of the assistant are one message."""
    messages: list[dict[str, Any]] = []
    turn: dict[str, Any] | None = None

    def of_assistant() -> dict[str, Any]:
        nonlocal turn
        if turn is None:
            turn = {"role": "assistant", "content": None}
            messages.append(turn)
        return turn

    for i, item in enumerate(items):
        where, kind = f"input[{i}]", item.get("type", "message")
        if kind == "message" and item.get("role") == "assistant":
            text = joined_text(f"{where}.content", item.get("content"), _TEXT_PARTS, "input")
            message = of_assistant()
            message["content"] = f"{message['content'] or ''}{text}"
        elif kind == "function_call":
            name, call_id = (text_of(item, key, where, "input") for key in ("name", "call_id"))
            call = function_call(call_id, name, item.get("arguments") or "{}")
            of_assistant().setdefault("tool_calls", []).append(call)
        elif kind == "reasoning":
            parts = item.get("content") or []
            text = joined_text(f"{where}.content", parts, ("reasoning_text",), "input")
            if text:
                of_assistant()["reasoning"] = text
        elif kind == "function_call_output":
            turn = None
            call_id = text_of(item, "call_id", where, "input")
            text = joined_text(f"{where}.output", item.get("output"), _TEXT_PARTS, "input")
            messages.append({"role": "tool", "tool_call_id": call_id, "content": text})
        elif kind == "message":
            turn = None
            role = item.get("role")
            if role not in ("user", "system", "developer"):
                raise BadRequest(
                    f"{where}.role must be user, assistant, system or developer, got {role!r:.100}.",
                    param="input",
                )
            text = joined_text(f"{where}.content", item.get("content"), _TEXT_PARTS, "input")
            messages.append({"role": "user" if role == "user" else "system", "content": text})
        else:
            raise BadRequest(f"{where}.type: {kind!r:.100} is not supported.", param="input")
    for message in messages:
        if message["content"] is None and "tool_calls" not in message:
            message["content"] = ""
    return messages
