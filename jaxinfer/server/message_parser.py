"""What a model writes, taken apart into the message that clients get: content and tool calls."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from jaxinfer.frontend.tool_parsers import CallPiece, ContentPiece, Piece, ToolParser
from jaxinfer.frontend.tool_parsers.required import NamedCallParser, RequiredCallsParser
from jaxinfer.server.errors import BadRequest
from jaxinfer.server.protocol.tools import ToolFields
from jaxinfer.server.serving import Serving


class MessageParser:
    """One choice's. Takes the text as it comes, whole or in parts."""

    def __init__(self, tools: ToolParser | None, one_call: bool) -> None:
        self._tools = tools
        self._one_call = one_call
        self.num_calls = 0

    def feed(self, text: str) -> list[Piece]:
        if self._tools is None:
            return [ContentPiece(text)] if text else []
        return self._counted(self._tools.feed(text) if text else [])

    def finish(self) -> list[Piece]:
        """The rest, after the last text."""
        return [] if self._tools is None else self._counted(self._tools.finish())

    def _counted(self, pieces: list[Piece]) -> list[Piece]:
        if self._one_call:
            pieces = [p for p in pieces if isinstance(p, ContentPiece) or p.index == 0]
        self.num_calls += sum(isinstance(p, CallPiece) and p.name is not None for p in pieces)
        return pieces


def message_parser(serving: Serving, request: ToolFields) -> MessageParser | None:
    """None where the message is what the model writes. Raises `BadRequest` for a choice that this server leaves to no
    model."""
    mode, name = request.chosen
    if mode == "none":
        return None
    parser: ToolParser
    if mode == "named":
        parser = NamedCallParser(str(name))
    elif mode == "required":
        parser = RequiredCallsParser(request.tools or ())
    else:
        kind = serving.tool_parser
        if kind is None:
            raise BadRequest(
                "tool_choice auto is not enabled on this server: it takes --enable-auto-tool-choice and "
                "--tool-call-parser. The choices required and a named function do without.",
                param="tool_choice",
            )
        parser = kind(request.tools or ())
    return MessageParser(parser, request.parallel_tool_calls is False)


@dataclass(slots=True)
class MessageFields:
    """Pieces in the form of the OpenAI API. With `is_delta`, calls have their indices."""

    is_delta: bool
    content: str = ""
    calls: dict[int, dict[str, Any]] = field(default_factory=dict)

    def add(self, pieces: Iterable[Piece]) -> None:
        for piece in pieces:
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
        found: dict[str, Any] = {"content": self.content} if self.content else {}
        if self.calls:
            found["tool_calls"] = self.tool_calls()
        return found
