"""What a parser of tool calls is: a model's text goes in as it comes, content and calls come out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar
from uuid import uuid4


@dataclass(frozen=True, slots=True)
class ContentPiece:
    text: str


@dataclass(frozen=True, slots=True)
class CallPiece:
    """The first piece of call `index` has its `id` and `name`; the pieces' `arguments` add up to a JSON object."""

    index: int
    arguments: str = ""
    id: str | None = None
    name: str | None = None


type Piece = ContentPiece | CallPiece


@dataclass(slots=True)
class ToolCall:
    id: str
    name: str
    arguments: str


@dataclass(slots=True)
class ParsedText:
    content: str = ""
    calls: list[ToolCall] = field(default_factory=list)

    def add(self, pieces: Iterable[Piece]) -> None:
        for piece in pieces:
            if isinstance(piece, ContentPiece):
                self.content += piece.text
            elif piece.name is not None:
                self.calls.append(ToolCall(piece.id or "", piece.name, piece.arguments))
            else:
                self.calls[piece.index].arguments += piece.arguments


class ToolParser(ABC):
    """One output's. However the text is cut into pieces, the same content and calls have to come out of it, and nothing
    that came out is ever taken back: a call whose text breaks off keeps the arguments that it had.

    `tools` are the request's, in the form of the OpenAI API.
    """

    marks: ClassVar[tuple[str, ...]] = ()
    """What calls are marked by. Where the model has special tokens among these, the text holds special tokens."""

    call_tag: ClassVar[str | None] = None
    """The text that calls begin with, where there is one that no other output begins with."""

    def __init__(self, tools: Sequence[Mapping[str, Any]] = ()) -> None:
        self.tools = tools

    @abstractmethod
    def feed(self, text: str) -> list[Piece]:
        """What is certain now that `text` has been added."""

    @abstractmethod
    def finish(self) -> list[Piece]:
        """The rest: no text follows."""

    def parse(self, text: str) -> ParsedText:
        """A whole output, by a parser that has seen nothing yet."""
        parsed = ParsedText()
        parsed.add(self.feed(text))
        parsed.add(self.finish())
        return parsed


def new_call_id() -> str:
    return f"call_{uuid4().hex[:24]}"


class PieceWriter:
    """Collects what a parser finds. Blank text is held until it is known not to be next to a call, where it is dropped."""

    def __init__(self) -> None:
        self._pieces: list[Piece] = []
        self._blank = ""
        self.num_calls = 0

    def content(self, text: str) -> None:
        kept = text.rstrip()
        if kept:
            self._pieces.append(ContentPiece(self._blank + kept))
            self._blank = ""
        self._blank += text[len(kept) :]

    def begin(self, name: str, call_id: str) -> None:
        self._blank = ""
        self._pieces.append(CallPiece(self.num_calls, "", call_id, name))
        self.num_calls += 1

    def arguments(self, text: str) -> None:
        """More of the call that began last."""
        if text:
            self._pieces.append(CallPiece(self.num_calls - 1, text))

    def finish(self) -> None:
        if self._blank and not self.num_calls:
            self._pieces.append(ContentPiece(self._blank))
        self._blank = ""

    def take(self) -> list[Piece]:
        pieces, self._pieces = self._pieces, []
        return pieces


class ScanningParser(ToolParser):
    """A parser that reads its text from the left: `_scan` takes from `_text` what it can decide on, `_out` gets what
    that says, and at the end `_cut_off` gets the rest."""

    def __init__(self, tools: Sequence[Mapping[str, Any]] = ()) -> None:
        super().__init__(tools)
        self._text = ""
        self._out = PieceWriter()

    @abstractmethod
    def _scan(self) -> bool:
        """Take a part of `_text`; False when more has to come first."""

    @abstractmethod
    def _cut_off(self) -> None:
        """The output ends here."""

    def feed(self, text: str) -> list[Piece]:
        self._text += text
        while self._text and self._scan():
            pass
        return self._out.take()

    def finish(self) -> list[Piece]:
        self._cut_off()
        self._out.finish()
        return self._out.take()

    def _take(self, length: int) -> str:
        taken, self._text = self._text[:length], self._text[length:]
        return taken

    def _skip_blank(self) -> bool:
        """Whether anything else is left."""
        self._text = self._text.lstrip()
        return bool(self._text)

    def _new_id(self) -> str:
        return new_call_id()


def first_tag(text: str, tags: Sequence[str], start: int = 0) -> tuple[int, str | None]:
    """Where the first of the tags begins at or after `start`, and which it is; or with None, up to where the text
    certainly holds none, whatever follows. Of tags no one may begin with another."""
    found = [(at, tag) for tag in tags if (at := text.find(tag, start)) >= 0]
    if found:
        return min(found)
    longest = max(map(len, tags))
    for at in range(max(start, len(text) - longest + 1), len(text)):
        rest = text[at:]
        if any(tag.startswith(rest) for tag in tags):
            return at, None
    return len(text), None
