"""`/tokenize` and `/detokenize`."""

from __future__ import annotations

from typing import Any

from jaxinfer.server.protocol.chat import ChatTemplateFields
from jaxinfer.server.protocol.common import Int, NullsAreAbsent


class TokenizeCompletionRequest(NullsAreAbsent):
    model: str | None = None
    prompt: str
    add_special_tokens: bool = True
    return_token_strs: bool = False


class TokenizeChatRequest(ChatTemplateFields):
    model: str | None = None
    return_token_strs: bool = False
    tools: list[dict[str, Any]] | None = None


class DetokenizeRequest(NullsAreAbsent):
    model: str | None = None
    tokens: list[Int]
