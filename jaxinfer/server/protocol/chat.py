"""`/v1/chat/completions`, and how messages become what chat templates take."""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import BaseModel, Field, model_validator

from jaxinfer.server.errors import BadRequest
from jaxinfer.server.protocol.common import GenerationRequest, Int


class ChatTemplateFields(BaseModel):
    """What decides how a conversation is written as a prompt."""

    messages: list[dict[str, Any]] = Field(min_length=1)
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = False
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _check_generation_prompt(self) -> ChatTemplateFields:
        if self.continue_final_message and self.add_generation_prompt:
            raise BadRequest(
                "continue_final_message and add_generation_prompt can't both be true.",
                param="continue_final_message",
            )
        return self

    def template_messages(self) -> list[dict[str, Any]]:
        """Messages whose content is a string, as most templates expect. Raises `BadRequest`."""
        return [_message(i, message) for i, message in enumerate(self.messages)]


class ChatCompletionRequest(ChatTemplateFields, GenerationRequest):
    """`max_tokens` is the older name of `max_completion_tokens`; without either, the context is the limit."""

    unsupported: ClassVar[dict[str, str]] = GenerationRequest.unsupported | {
        "tools": "Tools are not supported yet.",
        "functions": "Functions are not supported.",
        "audio": "Audio is not supported.",
        "media_io_kwargs": "Only text is supported.",
        "mm_processor_kwargs": "Only text is supported.",
    }
    without_effect: ClassVar[frozenset[str]] = GenerationRequest.without_effect | {
        "include_reasoning",
        "modalities",
        "tool_choice",
        "tools",
        "verbosity",
    }

    logprobs: bool | None = False
    top_logprobs: Int | None = None
    max_tokens: Int | None = None
    max_completion_tokens: Int | None = None
    echo: bool = False
    documents: list[dict[str, Any]] | None = None
    reasoning_effort: str | None = None

    @model_validator(mode="after")
    def _check(self) -> ChatCompletionRequest:
        if self.top_logprobs is not None:
            if self.top_logprobs < 0:
                raise BadRequest(
                    f"top_logprobs must be at least 0, got {self.top_logprobs}.",
                    param="top_logprobs",
                )
            if not self.logprobs and self.top_logprobs > 0:
                raise BadRequest("top_logprobs needs logprobs to be true.", param="top_logprobs")
        return self

    @property
    def num_logprobs(self) -> int | None:
        if self.logprob_token_ids:
            return len(self.logprob_token_ids)
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def limit(self) -> tuple[str, int | None]:
        """The limit of the output, and the name under which it was given."""
        if self.max_completion_tokens is not None:
            return "max_completion_tokens", self.max_completion_tokens
        return "max_tokens", self.max_tokens


def _message(index: int, message: dict[str, Any]) -> dict[str, Any]:
    where = f"messages[{index}]"
    if not isinstance(message.get("role"), str):
        raise BadRequest(f"{where}.role must be a string.", param="messages")
    content = message.get("content")
    if isinstance(content, str):
        return message
    if content is None:
        if not message.get("tool_calls"):
            raise BadRequest(f"{where}.content must be a string.", param="messages")
        return message
    if not isinstance(content, list):
        raise BadRequest(
            f"{where}.content must be a string or a list of text parts.", param="messages"
        )
    return message | {"content": "\n".join(_text(where, part) for part in content)}


def _text(where: str, part: Any) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, dict) and isinstance(part.get("text"), str):
        return part["text"]
    kind = part.get("type") if isinstance(part, dict) else None
    raise BadRequest(
        f"{where}.content: only parts of type 'text' are supported, got {kind!r:.100}.",
        param="messages",
    )
