"""What a parser of reasoning is: a model's text goes in as it comes, its thoughts and its answer come out."""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from typing import ClassVar, NamedTuple

from jaxinfer.frontend.tool_parsers.base import first_tag


class ReasoningPiece(NamedTuple):
    """The thoughts come before the content."""

    reasoning: str = ""
    content: str = ""


class ReasoningParser(ABC):
    """One output's. However the text is cut into pieces, the same has to come out.

    Thoughts stand between `start_token` and `end_token`, which are single tokens of the model. `begins_within`: an output
    begins with thoughts where the prompt says nothing else, whether or not it begins with `start_token`.
    """

    start_token: ClassVar[str] = "<think>"
    end_token: ClassVar[str] = "</think>"
    begins_within: ClassVar[bool] = False

    def __init__(self, thinks: bool | None = None) -> None:
        """`thinks`: whether the output begins with thoughts, None where its beginning shows it."""
        self.thinks = thinks

    @abstractmethod
    def feed(self, text: str) -> ReasoningPiece:
        """What is certain now that `text` has been added."""

    @abstractmethod
    def finish(self) -> ReasoningPiece:
        """The rest: no text follows."""

    @classmethod
    def after_prompt(cls, prompt: str, begun: str | None = None) -> bool | None:
        """`thinks` for the output after this prompt; `begun` is the answer's text that the prompt ends with, for the
        model to go on."""
        if begun is not None:
            return begun.rfind(cls.start_token) > begun.rfind(cls.end_token)
        prompt = prompt.rstrip()
        if prompt.endswith(cls.end_token):
            return False
        return True if prompt.endswith(cls.start_token) or cls.begins_within else None


class _Phase(enum.Enum):
    START = 0
    WITHIN = 1
    GAP = 2
    """After the thoughts, before anything of the answer."""
    ANSWER = 3


class TaggedReasoningParser(ReasoningParser):
    """Thoughts between the two tokens' texts. White space around them, and before the answer after them, is dropped."""

    def __init__(self, thinks: bool | None = None) -> None:
        super().__init__(thinks)
        self._phase = _Phase.START
        self._text = ""
        self._blank = ""
        self._has_thought = False

    def feed(self, text: str) -> ReasoningPiece:
        self._text += text
        reasoning = content = ""
        if self._phase is _Phase.START:
            self._start()
        if self._phase is _Phase.WITHIN:
            reasoning = self._thoughts()
        if self._phase is _Phase.GAP:
            self._text = self._text.lstrip()
            if self._text:
                self._phase = _Phase.ANSWER
        if self._phase is _Phase.ANSWER:
            content, self._text = self._text, ""
        return ReasoningPiece(reasoning, content)

    def _start(self) -> None:
        """The start token, or what decides that it doesn't come."""
        if self.thinks is False:
            self._phase = _Phase.ANSWER
            return
        rest = self._text.lstrip()
        if rest.startswith(self.start_token):
            self._text = rest.removeprefix(self.start_token)
            self._phase = _Phase.WITHIN
        elif not self.start_token.startswith(rest):
            self._phase = _Phase.WITHIN if self.thinks else _Phase.ANSWER

    def _thoughts(self) -> str:
        at, tag = first_tag(self._text, (self.end_token,))
        found = self._trimmed(self._text[:at])
        self._text = self._text[at:]
        if tag is not None:
            self._text = self._text.removeprefix(tag)
            self._phase = _Phase.GAP
        return found

    def _trimmed(self, text: str) -> str:
        """Blanks wait for what follows them."""
        text = self._blank + text if self._has_thought else text.lstrip()
        kept = text.rstrip()
        self._blank = text[len(kept) :]
        self._has_thought |= bool(kept)
        return kept

    def finish(self) -> ReasoningPiece:
        text, self._text = self._text, ""
        if self._phase is _Phase.WITHIN or (self._phase is _Phase.START and self.thinks):
            return ReasoningPiece(reasoning=self._trimmed(text))
        return ReasoningPiece(content=text)
