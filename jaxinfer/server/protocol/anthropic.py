"""`/v1/messages`: Anthropic's, as far as it is about text and tools of the client's own."""

from __future__ import annotations

import json
from typing import Any, ClassVar

from pydantic import Field

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

_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


class CountTokensRequest(TranslatedRequest):
    without_effect: ClassVar[frozenset[str]] = frozenset(
        {
            "cache_control",
            "context_management",
            "inference_geo",
            "metadata",
            "service_tier",
            "speed",
            "user_profile_id",
        }
    )
    names: ClassVar[dict[str, str]] = {
        "stop": "stop_sequences",
        "response_format": "output_config",
        "reasoning_effort": "output_config",
        "thinking_token_budget": "thinking",
    }

    model: str | None = None
    messages: list[dict[str, Any]] = Field(min_length=1)
    system: str | list[dict[str, Any]] | None = None
    output_config: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    tool_choice: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None

    def chat(self, **fields: Any) -> ChatCompletionRequest:
        """Raises `BadRequest`."""
        system = self.system
        if system is not None:
            system = joined_text("system", system, ("text",), "system")
        messages = [m for i, turn in enumerate(self.messages) for m in _messages(i, turn)]
        given = {
            "model": self.model,
            "messages": with_system_first(system, messages),
            "parallel_tool_calls": not (self.tool_choice or {}).get("disable_parallel_tool_use"),
            "tool_choice": self._tool_choice(),
            "tools": self._tools(),
            **self._thinking(),
            **self._output(),
        }
        return self.chat_request(**(given | fields))

    def _tools(self) -> list[dict[str, Any]] | None:
        tools = []
        for i, tool in enumerate(self.tools or ()):
            if tool.get("type") not in (None, "custom"):
                raise BadRequest(
                    f"tools[{i}].type: only 'custom' is supported, got {tool['type']!r:.100}.",
                    param="tools",
                )
            function = {"name": tool.get("name"), "parameters": tool.get("input_schema")}
            if tool.get("description"):
                function["description"] = tool["description"]
            tools.append({"type": "function", "function": function})
        return tools or None

    def _tool_choice(self) -> str | dict[str, Any] | None:
        choice = self.tool_choice
        if choice is None:
            return None
        kind = choice.get("type")
        if kind == "tool":
            return {"type": "function", "function": {"name": choice.get("name")}}
        if kind not in _CHOICES:
            raise BadRequest(
                f"tool_choice.type must be auto, any, tool or none, got {kind!r:.100}.",
                param="tool_choice",
            )
        return _CHOICES[kind]

    def _thinking(self) -> dict[str, Any]:
        if self.thinking is None:
            return {}
        kind = self.thinking.get("type")
        if kind not in ("enabled", "adaptive", "disabled"):
            raise BadRequest(
                f"thinking.type must be enabled, adaptive or disabled, got {kind!r:.100}.",
                param="thinking",
            )
        extras = (self.model_extra or {}).get("chat_template_kwargs") or {}
        if not isinstance(extras, dict):
            return {}
        given = {"enable_thinking": kind != "disabled"} | extras
        return {
            "chat_template_kwargs": given,
            "thinking_token_budget": self.thinking.get("budget_tokens"),
        }

    def _output(self) -> dict[str, Any]:
        wanted = self.output_config or {}
        form = wanted.get("format")
        if form is None:
            return {"reasoning_effort": wanted.get("effort")}
        if not isinstance(form, dict) or form.get("type") != "json_schema":
            raise BadRequest(
                "output_config.format must have the type json_schema.", param="output_config"
            )
        form = {"type": "json_schema", "json_schema": form}
        return {"reasoning_effort": wanted.get("effort"), "response_format": form}


class MessagesRequest(CountTokensRequest):
    max_tokens: Int
    stop_sequences: list[str] | None = None
    stream: bool | None = False
    temperature: Float | None = None
    top_p: Float | None = None

    def chat(self, **fields: Any) -> ChatCompletionRequest:
        """Raises `BadRequest`."""
        return super().chat(
            max_tokens=self.max_tokens,
            stop=self.stop_sequences,
            stream=self.stream,
            temperature=self.temperature,
            top_p=self.top_p,
            **fields,
        )


def _messages(index: int, turn: dict[str, Any]) -> list[dict[str, Any]]:
    """Results of tools are messages of their own."""
    where, role, content = f"messages[{index}]", turn.get("role"), turn.get("content")
    if role not in ("user", "assistant", "system"):
        raise _bad(f"{where}.role must be user, assistant or system, got {role!r:.100}.")
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    if not isinstance(content, list):
        raise _bad(f"{where}.content must be a string or a list of blocks.")
    results: list[dict[str, Any]] = []
    message: dict[str, Any] = {"role": role}
    texts: list[str] = []
    for i, block in enumerate(content):
        place = f"{where}.content[{i}]"
        kind = block.get("type") if isinstance(block, dict) else None
        if kind == "text":
            texts.append(joined_text(place, [block], ("text",), "messages"))
        elif kind == "tool_use" and role == "assistant":
            name, id = (text_of(block, key, place, "messages") for key in ("name", "id"))
            call = function_call(id, name, json.dumps(block.get("input") or {}))
            message.setdefault("tool_calls", []).append(call)
        elif kind == "tool_result" and role == "user":
            id = text_of(block, "tool_use_id", place, "messages")
            text = joined_text(
                f"{place}.content", block.get("content") or "", ("text",), "messages"
            )
            results.append({"role": "tool", "tool_call_id": id, "content": text})
        elif kind == "thinking" and role == "assistant":
            message["reasoning"] = str(block.get("thinking") or "")
        elif kind == "redacted_thinking" and role == "assistant":
            continue  # encrypted, by another server
        else:
            raise _bad(f"{place}.type: {kind!r:.100} is not supported here.")
    if texts or "tool_calls" in message or not results:
        message["content"] = "\n".join(texts)
        return [*results, message]
    return results


def _bad(message: str) -> BadRequest:
    return BadRequest(message, param="messages")
