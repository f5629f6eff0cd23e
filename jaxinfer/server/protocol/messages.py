"""Messages as clients send them, made into what chat templates take."""

from __future__ import annotations

import json
from typing import Any

from jaxinfer.server.errors import BadRequest


def template_message(index: int, message: dict[str, Any]) -> dict[str, Any]:
    """One whose content is a string, as most templates expect, and whose calls have their arguments as objects. Fields
    that are null are left out, as is an empty list of calls: templates ask whether they are there. Raises
    `BadRequest`."""
    where = f"messages[{index}]"
    if any(value is None or value == [] for value in message.values()):
        message = {
            name: value
            for name, value in message.items()
            if value is not None and (name, value) != ("tool_calls", [])
        }
    if not isinstance(message.get("role"), str):
        raise _bad(f"{where}.role must be a string.")
    calls = message.get("tool_calls")
    changed: dict[str, Any] = {}
    if calls:
        if not isinstance(calls, list):
            raise _bad(f"{where}.tool_calls must be a list.")
        changed["tool_calls"] = [
            _call(f"{where}.tool_calls[{i}]", call) for i, call in enumerate(calls)
        ]
    if isinstance(message.get("reasoning"), str):
        # Templates know it by either name.
        changed["reasoning_content"] = message.get("reasoning_content") or message["reasoning"]
    content = message.get("content")
    if content is None:
        if message["role"] not in ("assistant", "tool"):
            raise _bad(f"{where}.content must be a string.")
        changed["content"] = ""
    elif isinstance(content, list):
        changed["content"] = "\n".join(_text(where, part) for part in content)
    elif not isinstance(content, str):
        raise _bad(f"{where}.content must be a string or a list of text parts.")
    return message | changed if changed else message


def _call(where: str, call: Any) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise _bad(f"{where} must have a function with a name.")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments) if arguments.strip() else {}
        except (ValueError, RecursionError) as error:
            raise _bad(f"{where}.function.arguments is not JSON: {error}.") from None
    arguments = {} if arguments is None else arguments
    if not isinstance(arguments, dict):
        raise _bad(f"{where}.function.arguments must be a JSON object, got {arguments!r:.100}.")
    return call | {"function": function | {"arguments": arguments}}


def _text(where: str, part: Any) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, dict) else None
    if isinstance(part, dict):
        text = part.get("refusal" if kind == "refusal" else "text")
        if isinstance(text, str):
            return text
    raise _bad(f"{where}.content: only parts of type 'text' are supported, got {kind!r:.100}.")


def _bad(message: str) -> BadRequest:
    return BadRequest(message, param="messages")
