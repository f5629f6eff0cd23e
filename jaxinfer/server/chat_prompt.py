"""A conversation as the text that the model continues."""

from __future__ import annotations

from typing import Any

from jaxinfer.server.errors import BadRequest
from jaxinfer.server.protocol.chat import ChatTemplateFields
from jaxinfer.server.serving import Serving

_RESERVED = frozenset({"chat_template", "messages", "tools"})


def chat_prompt(serving: Serving, request: ChatTemplateFields, **variables: Any) -> str:
    """`variables` are given to the template beside the request's own. Raises `BadRequest` for whatever the template
    refuses, and for a template in the request unless the server trusts its clients."""
    settings = serving.settings
    if request.chat_template is not None and not settings.trust_request_chat_template:
        raise BadRequest(
            "chat_template: this server uses no templates of its clients (--trust-request-chat-template).",
            param="chat_template",
        )
    mine = request.chat_template_kwargs or {}
    if reserved := sorted(_RESERVED & mine.keys()):
        raise BadRequest(
            f"chat_template_kwargs must not hold {', '.join(reserved)}.",
            param="chat_template_kwargs",
        )
    arguments: dict[str, Any] = {
        "add_generation_prompt": request.add_generation_prompt,
        "continue_final_message": request.continue_final_message,
        **settings.default_chat_template_kwargs,
        **variables,
        **mine,
    }
    template = request.chat_template or settings.chat_template
    tokenizer = serving.llm.get_tokenizer()
    messages = request.template_messages()
    named = tokenizer.chat_templates
    known = [named.get(template, template)] if template else named.values()
    if not any("developer" in text for text in known):
        messages = [_from_system(message) for message in messages]
    try:
        return tokenizer.apply_chat_template(messages, chat_template=template, **arguments)
    except BadRequest:
        raise
    except Exception as error:  # templates are programs, and may fail in any way
        text = str(error)
        if not isinstance(error, ValueError):
            text = f"The chat template can't render these messages: {error!r}"
        raise BadRequest(text, param="messages") from error


def _from_system(message: dict[str, Any]) -> dict[str, Any]:
    """OpenAI's newer name of the role is unknown to most templates, which write whatever they are given, or fail."""
    return message | {"role": "system"} if message["role"] == "developer" else message
