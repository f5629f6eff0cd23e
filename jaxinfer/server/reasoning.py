"""What a server with a reasoning parser knows of its model's thoughts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from jaxinfer.engine.messages import Thinking
from jaxinfer.frontend.reasoning_parsers import ReasoningParser, reasoning_parsers
from jaxinfer.frontend.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Reasoning:
    """The parser, and the ids of its two tokens."""

    parser: type[ReasoningParser]
    start_token: int
    end_token: int

    @classmethod
    def of(cls, name: str, tokenizer: Tokenizer) -> Self:
        """Raises `ValueError` for a tokenizer that lacks the parser's tokens."""
        parser = reasoning_parsers.get(name)
        tokens = [parser.start_token, parser.end_token]
        start, end = tokenizer.convert_tokens_to_ids(tokens)
        if start is None or end is None:
            raise ValueError(
                f"reasoning_parser {name!r} is for models whose vocabularies hold {tokens[0]} and {tokens[1]}; this "
                "model's doesn't."
            )
        return cls(parser, start, end)

    def thinking(self, thinks: bool | None, max_tokens: int | None) -> Thinking | None:
        """What the engine has to know of an output that begins as `ReasoningParser.thinks` says; None: nothing."""
        if thinks is False:
            return None
        return Thinking(self.start_token, self.end_token, bool(thinks), max_tokens)


class ThoughtCounter:
    """Counts an output's tokens up to the end of its thoughts, both marks among them."""

    def __init__(self, reasoning: Reasoning, thinks: bool | None) -> None:
        self._reasoning = reasoning
        self._thinks = thinks
        self.num_tokens = 0

    def add(self, token_ids: Sequence[int]) -> None:
        for token in token_ids:
            if self._thinks is None:
                self._thinks = token == self._reasoning.start_token
            if not self._thinks:
                return
            self.num_tokens += 1
            self._thinks = token != self._reasoning.end_token
