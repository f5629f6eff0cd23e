"""The content of a message of Anthropic's API: its blocks, and the events in which they come."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any

from jaxinfer.frontend.tool_parsers import CallPiece, ContentPiece
from jaxinfer.server.message_parser import MessagePiece, ThoughtPiece

type Event = dict[str, Any]


class MessageBlocks:
    """Takes pieces, in their order, and gives events."""

    def __init__(self) -> None:
        self._blocks: list[dict[str, Any]] = []
        self._arguments: dict[int, str] = {}
        """By the index of their block."""
        self._is_open = False

    def content(self) -> list[dict[str, Any]]:
        """The blocks, without a call whose arguments break off."""
        found = []
        for i, block in enumerate(self._blocks):
            if i not in self._arguments:
                found.append(block)
                continue
            try:
                arguments = json.loads(self._arguments[i])
            except (ValueError, RecursionError):
                continue
            found.append(block | {"input": arguments})
        return found

    def add(self, pieces: Iterable[MessagePiece]) -> Iterator[Event]:
        for piece in pieces:
            if isinstance(piece, CallPiece):
                yield from self._call(piece)
            elif isinstance(piece, ThoughtPiece):
                yield from self._text("thinking", piece)
            else:
                yield from self._text("text", piece)

    def finish(self) -> Iterator[Event]:
        if self._is_open:
            self._is_open = False
            yield {"type": "content_block_stop", "index": len(self._blocks) - 1}

    def _text(self, kind: str, piece: ContentPiece | ThoughtPiece) -> Iterator[Event]:
        if not (self._is_open and self._blocks[-1]["type"] == kind):
            # Thoughts are signed where they are secret; here they aren't.
            signature = {"signature": ""} if kind == "thinking" else {}
            yield from self._open({"type": kind, kind: ""} | signature)
        self._blocks[-1][kind] += piece.text
        yield self._delta({"type": f"{kind}_delta", kind: piece.text})

    def _call(self, piece: CallPiece) -> Iterator[Event]:
        if piece.name is not None:
            block = {"type": "tool_use", "id": piece.id, "name": piece.name, "input": {}}
            yield from self._open(block)
            self._arguments[len(self._blocks) - 1] = ""
        if piece.arguments:
            self._arguments[len(self._blocks) - 1] += piece.arguments
            yield self._delta({"type": "input_json_delta", "partial_json": piece.arguments})

    def _open(self, block: dict[str, Any]) -> Iterator[Event]:
        yield from self.finish()
        self._blocks.append(block)
        self._is_open = True
        index = len(self._blocks) - 1
        yield {"type": "content_block_start", "index": index, "content_block": dict(block)}

    def _delta(self, delta: dict[str, Any]) -> Event:
        return {"type": "content_block_delta", "index": len(self._blocks) - 1, "delta": delta}
