"""Requests of other APIs as chat completions, which all of them are underneath."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import ConfigDict, ValidationError

from jaxinfer.server.errors import ApiError, BadRequest
from jaxinfer.server.protocol.chat import ChatCompletionRequest
from jaxinfer.server.protocol.common import NullsAreAbsent, is_neutral

EXTRAS = frozenset(
    {
        "cache_salt",
        "chat_template",
        "chat_template_kwargs",
        "frequency_penalty",
        "ignore_eos",
        "include_stop_str_in_output",
        "logit_bias",
        "min_p",
        "min_tokens",
        "presence_penalty",
        "priority",
        "repetition_penalty",
        "request_id",
        "seed",
        "structured_outputs",
        "thinking_token_budget",
        "timeout",
        "top_k",
    }
)
"""Fields of chat completions that requests of other APIs may have too."""


class TranslatedRequest(NullsAreAbsent):
    """Fields that are in none of the lists are refused, as nobody would notice that they have no effect."""

    model_config = ConfigDict(extra="allow", protected_namespaces=())

    without_effect: ClassVar[frozenset[str]] = frozenset()
    """Known, and nothing that this server would do differently."""

    names: ClassVar[dict[str, str]] = {}
    """Of chat completions' fields, those that have other names here."""

    def chat_request(self, **fields: Any) -> ChatCompletionRequest:
        """With these `fields` and the extra ones. Raises `BadRequest` with the names of this API."""
        extras = self.model_extra or {}
        for name, value in extras.items():
            if name not in EXTRAS | self.without_effect and not is_neutral(value):
                raise BadRequest(f"{name} is not supported.", param=name)
        given = {name: value for name, value in extras.items() if name in EXTRAS}
        try:
            return ChatCompletionRequest.model_validate(
                given | {name: value for name, value in fields.items() if value is not None}
            )
        except ValidationError as error:
            first = error.errors()[0]
            name = str(first["loc"][0]) if first["loc"] else None
            where = ".".join(str(part) for part in first["loc"])
            raise self.renamed(BadRequest(f"{where}: {first['msg']}", param=name)) from error
        except ApiError as error:
            raise self.renamed(error) from error

    def renamed(self, error: ApiError) -> ApiError:
        """`error` with the name that the field at fault has in this API."""
        name = self.names.get(error.param or "")
        if name is not None:
            if error.message.startswith(str(error.param)):
                error.message = name + error.message[len(str(error.param)) :]
            error.param = name
        return error


def joined_text(where: str, content: Any, kinds: tuple[str, ...], param: str) -> str:
    """The text of a string, or of parts of these types. Raises `BadRequest`."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise BadRequest(f"{where} must be a string or a list of text parts.", param=param)
    texts = []
    for i, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        text = part.get("text") if isinstance(part, dict) else None
        if kind not in kinds or not isinstance(text, str):
            raise BadRequest(
                f"{where}[{i}]: only parts of type {' or '.join(kinds)} are supported, got {kind!r:.100}.",
                param=param,
            )
        texts.append(text)
    return "\n".join(texts)


def function_call(call_id: str, name: str, arguments: str) -> dict[str, Any]:
    """A call in a message of the assistant."""
    function = {"name": name, "arguments": arguments}
    return {"id": call_id, "type": "function", "function": function}


def with_system_first(system: str | None, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages after one of the system, which holds those of the system that they begin with as well: many templates
    know no other."""
    texts = [] if system is None else [system]
    start = 0
    while start < len(messages) and messages[start]["role"] == "system":
        texts.append(messages[start]["content"])
        start += 1
    head = [{"role": "system", "content": "\n\n".join(texts)}] if texts else []
    return head + messages[start:]


def text_of(value: Mapping[str, Any], name: str, where: str, param: str) -> str:
    """A string among an object's values. Raises `BadRequest`."""
    found = value.get(name)
    if not isinstance(found, str) or not found:
        raise BadRequest(f"{where}.{name} must be a non-empty string.", param=param)
    return found
