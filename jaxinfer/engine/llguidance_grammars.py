"""Grammars by llguidance: an Earley parser over the tokenizer's trie, in Rust."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from jaxinfer.engine.grammars import Matcher
from jaxinfer.engine.plan import Words

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher, LLTokenizer

_MAX_MESSAGE = 400


class LlguidanceMatcher:
    def __init__(self, matcher: LLMatcher) -> None:
        self.matcher = matcher
        self.is_finished = False

    def copy(self) -> LlguidanceMatcher:
        copied = LlguidanceMatcher(self.matcher.deep_copy())
        copied.is_finished = self.is_finished
        return copied

    def accept(self, token: int) -> str | None:
        # Where nothing can follow, llguidance stops before the end of the sequence, and says of it nothing new.
        nothing_left = self.matcher.is_stopped()
        if not self.matcher.consume_token(token):
            return _error(self.matcher)
        self.is_finished = nothing_left or self.matcher.stop_reason() == "EndOfSentence"
        return None

    def num_valid(self, tokens: list[int]) -> int:
        return self.matcher.validate_tokens(tokens)

    def forced_tokens(self) -> list[int]:
        return self.matcher.compute_ff_tokens()


class LlguidanceBackend:
    """`make_tokenizer` is called when the first grammar arrives, in that grammar's thread."""

    def __init__(self, make_tokenizer: Callable[[], LLTokenizer]) -> None:
        self._make_tokenizer = make_tokenizer
        self._tokenizer: LLTokenizer | None = None
        self._lock = threading.Lock()
        self._executor: LLExecutor | None = None

    def compile(self, grammar: str) -> LlguidanceMatcher:
        from llguidance import LLMatcher

        with self._lock:
            if self._tokenizer is None:
                self._tokenizer = self._make_tokenizer()
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0)
        if matcher.is_error():
            raise ValueError(_error(matcher))
        # What the first mask needs is computed here rather than in the host loop.
        matcher.compute_bitmask()
        return LlguidanceMatcher(matcher)

    def fill_masks(self, matchers: Sequence[tuple[Matcher, int]], words: Words) -> None:
        if self._executor is None:
            from llguidance import LLExecutor

            self._executor = LLExecutor()
        assert words.flags.c_contiguous
        pairs = [(m.matcher, row) for m, row in matchers if isinstance(m, LlguidanceMatcher)]
        self._executor.unsafe_compute_mask_ptr(
            pairs, words.ctypes.data, words.shape[1] * words.itemsize, words.shape[0]
        )


def _error(matcher: LLMatcher) -> str:
    """Without the parser's state, which llguidance adds to some messages."""
    return matcher.get_error().split("<state>")[0].strip()[:_MAX_MESSAGE] or "unknown error"
