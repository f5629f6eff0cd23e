"""Chat templates: Jinja2 that models bring along, rendered as `transformers` does (untrusted code, so sandboxed)."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

_CONTINUE_TAG = "CONTINUE_FINAL_MESSAGE_TAG "

Message = Mapping[str, Any]


def render_chat(
    template: str,
    messages: Sequence[Message],
    *,
    special_tokens: Mapping[str, str],
    add_generation_prompt: bool = False,
    continue_final_message: bool = False,
    tools: Sequence[Mapping[str, Any]] | None = None,
    documents: Sequence[Mapping[str, Any]] | None = None,
    **variables: Any,
) -> str:
    """The conversation as the model's prompt. `special_tokens` and `variables` are names that the template may use.

    `continue_final_message` ends the prompt within the last message, for the model to go on with it. Raises
    `ValueError` for an empty conversation, a template that is no valid Jinja, and whatever the template refuses.
    """
    from jinja2.exceptions import TemplateError

    if not messages:
        raise ValueError("messages must not be empty.")
    if add_generation_prompt and continue_final_message:
        raise ValueError(
            "add_generation_prompt and continue_final_message exclude each other: one begins a message, the other goes "
            "on with the last."
        )
    chat = [dict(message) for message in messages]
    final = _tag_final_text(chat) if continue_final_message else ""
    try:
        text = _compile(template).render(
            messages=chat,
            tools=None if tools is None else list(tools),
            documents=None if documents is None else list(documents),
            add_generation_prompt=add_generation_prompt,
            **{**special_tokens, **variables},
        )
    except TemplateError as error:
        raise ValueError(f"The chat template can't render these messages: {error}") from error
    except (TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"The chat template can't render these messages: {error!r}") from error
    return _cut_at_tag(text, final) if continue_final_message else text


def _tag_final_text(chat: list[dict[str, Any]]) -> str:
    """Mark the end of the last message's text, and return that text."""
    content = chat[-1].get("content")
    if isinstance(content, str):
        chat[-1]["content"] = content + _CONTINUE_TAG
        return content
    if isinstance(content, Sequence):
        blocks = [dict(block) for block in content]
        for block in reversed(blocks):
            if "text" in block:
                text = block["text"]
                block["text"] = text + _CONTINUE_TAG
                chat[-1]["content"] = blocks
                return text
    raise ValueError("continue_final_message needs a final message with text.")


def _cut_at_tag(text: str, final: str) -> str:
    at = text.rfind(_CONTINUE_TAG.strip())
    if at < 0 or final.strip() not in text:
        raise ValueError(
            "continue_final_message: the chat template drops or changes the final message."
        )
    if text[at:].startswith(_CONTINUE_TAG):
        return text[:at]
    # The template strips messages: the text's own trailing space is gone too.
    return text[:at].rstrip()


@functools.lru_cache(maxsize=64)
def _compile(template: str):
    import jinja2
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class GenerationBlocks(Extension):
        """`{% generation %}` marks what a model wrote, for training; here only its content counts."""

        tags = {"generation"}

        def parse(self, parser: Any) -> list[Any]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationBlocks, loopcontrols]
    )

    def raise_exception(message: str) -> None:
        raise jinja2.exceptions.TemplateError(message)

    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment.from_string(template)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes HTML and sorts keys."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
