"""The text of one completion as its tokens arrive: complete characters, and nothing of a stop string early."""

from __future__ import annotations

from collections.abc import Sequence

from jaxinfer.frontend.token_text import TextStream
from jaxinfer.sampling_params import SamplingParams


class Detokenizer:
    """Text goes through two gates: the stream lets whole characters pass, and here the longest end of the text that
    could be the beginning of a stop string waits until it is one, is none, or the completion ends.
    """

    __slots__ = ("_held", "_include_stop", "_longest", "_min_tokens", "_num_tokens", "_released")
    __slots__ += ("_starts", "_stops", "_stream")

    def __init__(self, stream: TextStream, params: SamplingParams) -> None:
        self._stream = stream
        self._stops = params.stop_strings
        self._starts = frozenset(stop[0] for stop in self._stops)
        self._longest = max(map(len, self._stops), default=0)
        self._include_stop = params.include_stop_str_in_output
        self._min_tokens = params.min_tokens
        self._num_tokens = 0
        self._released: list[str] = []
        self._held = ""

    @property
    def has_stops(self) -> bool:
        return bool(self._stops)

    def push(self, token_ids: Sequence[int]) -> tuple[int, str] | None:
        """Add tokens. When a stop string ends the text, returns how many of them were used and that string.

        Of several stop strings the one that is complete first counts, so the result doesn't depend on how the text
        is cut into tokens; of those that end together, the longest. Those complete within the first `min_tokens`
        tokens are ignored.
        """
        if not self._stops:
            text = self._stream.push(token_ids)
            if text:
                self._released.append(text)
            return None
        for i, token_id in enumerate(token_ids):
            self._num_tokens += 1
            stop = self._check(self._stream.push((token_id,)))
            if stop is not None:
                return i + 1, stop
        return None

    def _check(self, new: str) -> str | None:
        if not new:
            return None
        text = self._held + new
        if self._num_tokens > self._min_tokens and (match := self._first_match(text)):
            end, stop = match
            self._released.append(text[: end if self._include_stop else end - len(stop)])
            self._held = ""
            return stop
        cut = self._start_of_possible_stop(text)
        self._released.append(text[:cut])
        self._held = text[cut:]
        return None

    def _first_match(self, text: str) -> tuple[int, str] | None:
        """The end of the first stop string that `text` completes after what was held, and the string."""
        best: tuple[int, int, str] | None = None
        for stop in self._stops:
            found = text.find(stop, max(0, len(self._held) - len(stop) + 1))
            if found >= 0 and (best is None or (found + len(stop), found) < best[:2]):
                best = (found + len(stop), found, stop)
        return None if best is None else (best[0], best[2])

    def _start_of_possible_stop(self, text: str) -> int:
        for start in range(max(0, len(text) - self._longest + 1), len(text)):
            if text[start] in self._starts:
                rest = text[start:]
                if any(len(rest) < len(stop) and stop.startswith(rest) for stop in self._stops):
                    return start
        return len(text)

    def finish(self) -> None:
        """No more tokens: release whatever was held."""
        self._released.append(self._held + self._stream.flush())
        self._held = ""

    def take(self) -> str:
        """The text released since the last call."""
        if not self._released:
            return ""
        text = "".join(self._released)
        self._released.clear()
        return text
