"""What a model writes, taken apart into the message that clients get: thoughts, content and tool calls."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from jaxinfer.frontend.reasoning_parsers import ReasoningParser, ReasoningPiece
from jaxinfer.frontend.tool_parsers import CallPiece, ContentPiece, Piece, ToolParser
from jaxinfer.frontend.tool_parsers.required import NamedCallParser, RequiredCallsParser
from jaxinfer.server.errors import BadRequest
from jaxinfer.server.protocol.tools import ToolFields
from jaxinfer.server.serving import Serving


@dataclass(frozen=True, slots=True)
class ThoughtPiece:
    text: str


type MessagePiece = Piece | ThoughtPiece


class MessageParser:
    """One choice's. Takes the text as it comes, whole or in parts. Any of the parsers may be missing."""

    def __init__(
        self,
        reasoning: ReasoningParser | None = None,
        tools: ToolParser | None = None,
        *,
        one_call: bool = False,
        keeps_thoughts: bool = True,
    ) -> None:
        self._reasoning = reasoning
        self._tools = tools
        self._one_call = one_call
        self._keeps_thoughts = keeps_thoughts
        self.num_calls = 0

    def feed(self, text: str) -> list[MessagePiece]:
        if not text:
            return []
        if self._reasoning is None:
            return self._content(text)
        return self._both(self._reasoning.feed(text))

    def finish(self) -> list[MessagePiece]:
        """The rest, after the last text."""
        pieces = [] if self._reasoning is None else self._both(self._reasoning.finish())
        return pieces if self._tools is None else pieces + self._calls(self._tools.finish())

    def _both(self, found: ReasoningPiece) -> list[MessagePiece]:
        has_thought = found.reasoning and self._keeps_thoughts
        thoughts: list[MessagePiece] = [ThoughtPiece(found.reasoning)] if has_thought else []
        return thoughts + self._content(found.content) if found.content else thoughts

    def _content(self, text: str) -> list[MessagePiece]:
        return [ContentPiece(text)] if self._tools is None else self._calls(self._tools.feed(text))

    def _calls(self, pieces: list[Piece]) -> list[MessagePiece]:
        if self._one_call:
            pieces = [p for p in pieces if isinstance(p, ContentPiece) or p.index == 0]
        self.num_calls += sum(isinstance(p, CallPiece) and p.name is not None for p in pieces)
        return list(pieces)


def tool_parser(serving: Serving, request: ToolFields) -> ToolParser | None:
    """Of one choice; None where no calls are looked for. Raises `BadRequest` for a choice that this server leaves to no
    model."""
    mode, name = request.chosen
    if mode == "none":
        return None
    if mode == "named":
        return NamedCallParser(str(name))
    if mode == "required":
        return RequiredCallsParser(request.tools or ())
    kind = serving.tool_parser
    if kind is None:
        raise BadRequest(
            "tool_choice auto is not enabled on this server: it takes --enable-auto-tool-choice and "
            "--tool-call-parser. The choices required and a named function do without.",
            param="tool_choice",
        )
    return kind(request.tools or ())


@dataclass(slots=True)
class MessageFields:
    """Pieces in the form of the OpenAI API. With `is_delta`, calls have their indices."""

    is_delta: bool
    reasoning: str = ""
    content: str = ""
    calls: dict[int, dict[str, Any]] = field(default_factory=dict)

    def add(self, pieces: Iterable[MessagePiece]) -> None:
        for piece in pieces:
            if isinstance(piece, ThoughtPiece):
                self.reasoning += piece.text
                continue
            if isinstance(piece, ContentPiece):
                self.content += piece.text
                continue
            call = self.calls.setdefault(piece.index, {"function": {"arguments": ""}})
            if piece.name is not None:
                call |= {"id": piece.id, "type": "function"}
                call["function"] = {"name": piece.name, "arguments": ""}
            call["function"]["arguments"] += piece.arguments

    def tool_calls(self) -> list[dict[str, Any]]:
        return [
            {"index": index} | call if self.is_delta else call
            for index, call in sorted(self.calls.items())
        ]

    def delta(self) -> dict[str, Any]:
        """What there is."""
        found: dict[str, Any] = {"reasoning": self.reasoning} if self.reasoning else {}
        if self.content:
            found["content"] = self.content
        if self.calls:
            found["tool_calls"] = self.tool_calls()
        return found

    def message(self) -> dict[str, Any]:
        """As a message of the assistant in a conversation."""
        message: dict[str, Any] = {"role": "assistant", "content": self.content}
        if self.reasoning:
            message["reasoning"] = self.reasoning
        return message | ({"tool_calls": self.tool_calls()} if self.calls else {})
