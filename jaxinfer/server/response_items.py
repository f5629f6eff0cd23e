"""The output of a response: its items, and the events in which they come."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any
from uuid import uuid4

from jaxinfer.frontend.tool_parsers import CallPiece, ContentPiece
from jaxinfer.server.message_parser import MessagePiece, ThoughtPiece

type Event = dict[str, Any]


class ResponseItems:
    """Takes pieces, in their order, and gives events without their sequence numbers. `output` holds the items so far, the
    last of which may still grow."""

    def __init__(self) -> None:
        self.output: list[dict[str, Any]] = []
        self._is_open = False

    def add(self, pieces: Iterable[MessagePiece]) -> Iterator[Event]:
        for piece in pieces:
            if isinstance(piece, ThoughtPiece):
                yield from self._text("reasoning", piece.text)
            elif isinstance(piece, ContentPiece):
                yield from self._text("message", piece.text)
            else:
                yield from self._call(piece)

    def finish(self, status: str) -> Iterator[Event]:
        """`status` of the last item. An output without any has an empty message."""
        if not self.output:
            yield from self._text("message", "")
        yield from self._close(status)

    def _text(self, kind: str, text: str) -> Iterator[Event]:
        if not (self._is_open and self.output[-1]["type"] == kind):
            yield from self._close("completed")
            yield from self._open(_new_text_item(kind))
            part = _part(kind, "")
            self.output[-1]["content"].append(part)
            yield self._event("response.content_part.added", content_index=0, part=dict(part))
        if text:
            self.output[-1]["content"][0]["text"] += text
            yield self._event(
                f"{_TEXT_EVENTS[kind]}.delta", content_index=0, delta=text, **_more(kind)
            )

    def _call(self, piece: CallPiece) -> Iterator[Event]:
        if piece.name is not None:
            yield from self._close("completed")
            yield from self._open(
                {
                    "type": "function_call",
                    "id": f"fc_{uuid4().hex}",
                    "call_id": piece.id,
                    "name": piece.name,
                    "arguments": "",
                }
            )
        if piece.arguments:
            self.output[-1]["arguments"] += piece.arguments
            yield self._event("response.function_call_arguments.delta", delta=piece.arguments)

    def _open(self, item: dict[str, Any]) -> Iterator[Event]:
        self.output.append(item | {"status": "in_progress"})
        self._is_open = True
        yield self._event("response.output_item.added", item=_copy(self.output[-1]))

    def _close(self, status: str) -> Iterator[Event]:
        if not self._is_open:
            return
        item = self.output[-1]
        item["status"] = status
        if item["type"] == "function_call":
            done = {"name": item["name"], "arguments": item["arguments"]}
            yield self._event("response.function_call_arguments.done", **done)
        else:
            kind, [part] = item["type"], item["content"]
            text = {"content_index": 0, "text": part["text"]}
            yield self._event(f"{_TEXT_EVENTS[kind]}.done", **text, **_more(kind))
            yield self._event("response.content_part.done", content_index=0, part=part)
        self._is_open = False
        yield self._event("response.output_item.done", item=item)

    def _event(self, kind: str, **fields: Any) -> Event:
        place = {"output_index": len(self.output) - 1}
        if "item" not in fields:
            place["item_id"] = self.output[-1]["id"]
        return {"type": kind} | place | fields


_TEXT_EVENTS = {"message": "response.output_text", "reasoning": "response.reasoning_text"}


def _new_text_item(kind: str) -> dict[str, Any]:
    if kind == "reasoning":
        return {"type": kind, "id": f"rs_{uuid4().hex}", "summary": [], "content": []}
    return {"type": kind, "id": f"msg_{uuid4().hex}", "role": "assistant", "content": []}


def _part(kind: str, text: str) -> dict[str, Any]:
    if kind == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _more(kind: str) -> dict[str, Any]:
    return {"logprobs": []} if kind == "message" else {}


def _copy(item: dict[str, Any]) -> dict[str, Any]:
    """As it is now: its content is added to."""
    return item | ({"content": []} if "content" in item else {})
