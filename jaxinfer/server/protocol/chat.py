"""`/v1/chat/completions`, and how messages become what chat templates take."""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import Field, model_validator

from jaxinfer.server.errors import BadRequest
from jaxinfer.server.protocol.common import GenerationRequest, Int, NullsAreAbsent
from jaxinfer.server.protocol.messages import template_message
from jaxinfer.server.protocol.tools import ToolFields


class ChatTemplateFields(NullsAreAbsent):
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
        """Raises `BadRequest`."""
        return [template_message(i, message) for i, message in enumerate(self.messages)]


class ChatCompletionRequest(ChatTemplateFields, ToolFields, GenerationRequest):
    """`max_tokens` is the older name of `max_completion_tokens`; without either, the context is the limit."""

    unsupported: ClassVar[dict[str, str]] = {
        name: reason
        for name, reason in GenerationRequest.unsupported.items()
        if name != "thinking_token_budget"
    } | {
        "functions": "functions is not supported; use tools.",
        "function_call": "function_call is not supported; use tool_choice.",
        "audio": "Audio is not supported.",
        "media_io_kwargs": "Only text is supported.",
        "mm_processor_kwargs": "Only text is supported.",
    }
    without_effect: ClassVar[frozenset[str]] = GenerationRequest.without_effect | {
        "modalities",
        "verbosity",
    }

    logprobs: bool | None = False
    top_logprobs: Int | None = None
    max_tokens: Int | None = None
    max_completion_tokens: Int | None = None
    echo: bool = False
    documents: list[dict[str, Any]] | None = None
    reasoning_effort: str | None = None
    include_reasoning: bool = True
    thinking_token_budget: Int | None = Field(default=None, ge=0)

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
        mode = self.chosen.mode
        if self.use_beam_search and mode != "none":
            raise BadRequest("use_beam_search knows no tools.", param="use_beam_search")
        return self

    def structured(self) -> dict[str, Any] | None:
        """Where calls are demanded, what holds the output to them; a `response_format` is about answers, and there will be
        none. Raises `BadRequest` also where the output would have to be something else as well."""
        wanted, calls = super().structured(), self.enforced()
        if (
            calls is not None
            and wanted is not None
            and super().structured_field != "response_format"
        ):
            raise BadRequest(
                f"tool_choice {self.chosen.mode} and {self.structured_field} exclude each other: both say what the whole "
                "output is.",
                param="tool_choice",
            )
        return wanted if calls is None else calls

    @property
    def structured_field(self) -> str | None:
        return super().structured_field or (
            "tools" if self.chosen.mode in ("required", "named") else None
        )

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
