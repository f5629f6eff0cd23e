"""Outputs in which a model thinks before it answers: a bound on its thoughts, and a grammar that begins after them."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from jaxinfer.engine.messages import Thinking
from jaxinfer.engine.plan import Words

if TYPE_CHECKING:
    from jaxinfer.engine.grammars import GrammarBackend, Matcher


class _Phase(enum.Enum):
    OPEN = 0
    """The first token shows whether there are thoughts."""
    WITHIN = 1
    AFTER = 2


class ThinkingMatcher:
    """A matcher that lets thoughts pass, and from their end on is `answer`'s, if there is one: then none of `stops` may
    come before, so that an output which ends by itself has its answer."""

    def __init__(
        self, thinking: Thinking, answer: Matcher | None, stops: frozenset[int] = frozenset()
    ) -> None:
        self._thinking = thinking
        self._answer = answer
        self._stops = frozenset() if answer is None else stops
        self._phase = _Phase.WITHIN if thinking.has_begun else _Phase.OPEN
        self._num_thought = 0

    def copy(self) -> ThinkingMatcher:
        answer = None if self._answer is None else self._answer.copy()
        copied = ThinkingMatcher(self._thinking, answer, self._stops)
        copied._phase, copied._num_thought = self._phase, self._num_thought
        return copied

    def accept(self, token: int) -> str | None:
        if self._phase is _Phase.OPEN and token != self._thinking.start_token:
            self._phase = _Phase.AFTER
        if self._phase is _Phase.AFTER:
            return None if self._answer is None else self._answer.accept(token)
        if self._phase is _Phase.OPEN:
            self._phase = _Phase.WITHIN
        elif token == self._thinking.end_token:
            self._phase = _Phase.AFTER
        else:
            self._num_thought += 1
        return None

    def num_valid(self, tokens: list[int]) -> int:
        thinking, phase, num_thought = self._thinking, self._phase, self._num_thought
        for i, token in enumerate(tokens):
            if phase is _Phase.OPEN:
                is_start = token == thinking.start_token
                phase = _Phase.WITHIN if is_start else _Phase.AFTER
                if is_start:
                    continue
            if phase is _Phase.AFTER:
                rest = tokens[i:]
                return i + (len(rest) if self._answer is None else self._answer.num_valid(rest))
            if token == thinking.end_token:
                phase = _Phase.AFTER
                continue
            if num_thought == thinking.max_tokens or token in self._stops:
                return i
            num_thought += 1
        return len(tokens)

    def forced_tokens(self) -> list[int]:
        if self._phase is not _Phase.AFTER and not self._must_end:
            return []
        ends = [self._thinking.end_token] if self._must_end else []
        return ends if self._answer is None else [*ends, *self._answer.forced_tokens()]

    @property
    def is_finished(self) -> bool:
        return self._phase is _Phase.AFTER and self._answer is not None and self._answer.is_finished

    @property
    def _must_end(self) -> bool:
        return self._phase is _Phase.WITHIN and self._num_thought == self._thinking.max_tokens

    @property
    def mask_of(self) -> Matcher | None:
        """The matcher whose mask `restrict` goes on from, None for all tokens."""
        return None if self._phase is _Phase.WITHIN else self._answer

    def restrict(self, words: Words) -> None:
        """Make the mask of what may follow of that of `mask_of`: words [ceil(V / 32)]."""
        thinking = self._thinking
        if self._must_end:
            words[:] = 0
            _set(words, thinking.end_token)
        elif self._phase is _Phase.WITHIN:
            for token in self._stops - {thinking.end_token}:
                words[token >> 5] &= ~np.uint32(1 << (token & 31))
        elif self._phase is _Phase.OPEN:
            _set(words, thinking.start_token)


def _set(words: Words, token: int) -> None:
    words[token >> 5] |= np.uint32(1 << (token & 31))


def fill_masks(
    grammars: GrammarBackend | None, matchers: Sequence[tuple[Matcher, int]], words: Words
) -> None:
    """As `GrammarBackend.fill_masks`, of matchers of both kinds; the rows [N, ceil(V / 32)] allow every token before."""
    thinking: list[tuple[ThinkingMatcher, int]] = []
    followed: list[tuple[Matcher, int]] = []
    for matcher, row in matchers:
        if not isinstance(matcher, ThinkingMatcher):
            followed.append((matcher, row))
            continue
        thinking.append((matcher, row))
        if (answer := matcher.mask_of) is not None:
            followed.append((answer, row))
    if followed:
        assert grammars is not None
        grammars.fill_masks(followed, words)
    for thinker, row in thinking:
        thinker.restrict(words[row])
