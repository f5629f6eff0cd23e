"""From the core's columns of logprobs to what users read, with the text of each candidate."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from functools import partial
from typing import Protocol

import numpy as np

from jaxinfer.engine.messages import TokenLogprobs
from jaxinfer.flat_logprobs import FlatLogprobs
from jaxinfer.frontend.token_text import TextStream, TokenText
from jaxinfer.outputs import Logprob, PositionLogprobs


class LogprobHistory(Protocol):
    """The logprobs of a growing sequence of tokens."""

    def add(self, positions: Sequence[TokenLogprobs]) -> None: ...

    def since(self, start: int) -> Sequence[PositionLogprobs | None]:
        """Those of the positions from `start` on."""
        ...


def logprob_history(
    token_text: TokenText | None,
    context: Sequence[int],
    *,
    flat: bool,
    ranked: bool = True,
    is_prompt: bool = False,
) -> LogprobHistory:
    """Of what follows the tokens `context`; without `token_text` candidates have no text. `ranked`: candidates are the
    likeliest tokens, best first. A prompt has None for its first token, which is the context of the others."""
    if flat:
        return _FlatHistory(token_text, context, ranked, is_prompt)
    stream = None if token_text is None else token_text.stream(context, False)
    return _DictHistory(stream, ranked, is_prompt)


class _DictHistory:
    def __init__(self, stream: TextStream | None, ranked: bool, is_prompt: bool) -> None:
        self._stream = stream
        self._ranked = ranked
        self._positions: list[PositionLogprobs | None] = [None] if is_prompt else []

    def add(self, positions: Sequence[TokenLogprobs]) -> None:
        self._positions += [self._entries(scored) for scored in positions]

    def since(self, start: int) -> Sequence[PositionLogprobs | None]:
        return self._positions[start:]

    def _entries(self, scored: TokenLogprobs) -> PositionLogprobs:
        ids, values, stream = scored.token_ids, scored.logprobs, self._stream
        texts = [None] * len(ids) if stream is None else [stream.peek(token_id) for token_id in ids]
        entries = {ids[0]: Logprob(values[0], scored.rank, texts[0])}
        for rank in range(1, len(ids)):
            if ids[rank] != ids[0]:
                known = rank if self._ranked else None
                entries[ids[rank]] = Logprob(values[rank], known, texts[rank])
        if stream is not None:
            stream.push(ids[:1])
        return entries


class _FlatHistory:
    def __init__(
        self, token_text: TokenText | None, context: Sequence[int], ranked: bool, is_prompt: bool
    ) -> None:
        self._token_text = token_text
        self._context = context
        self._ranked = ranked
        self._ids, self._values, self._ranks = array("i"), array("f"), array("i")
        self._offsets = array("q", [0, 0] if is_prompt else [0])

    def add(self, positions: Sequence[TokenLogprobs]) -> None:
        for scored in positions:
            num = len(scored.token_ids)
            self._ids.extend(scored.token_ids)
            self._values.extend(scored.logprobs)
            self._ranks.append(scored.rank)
            self._ranks.extend(range(1, num) if self._ranked else [0] * (num - 1))
            self._offsets.append(len(self._ids))

    def since(self, start: int) -> FlatLogprobs:
        first, last = self._offsets[start], len(self._offsets) - 1
        return FlatLogprobs(
            np.array(self._ids[first:], np.int32),
            np.array(self._values[first:], np.float32),
            np.array(self._ranks[first:], np.int32),
            np.array(self._offsets[start:], np.int64) - first,
            None if self._token_text is None else partial(self._decode, start, last),
        )

    def _decode(self, start: int, last: int) -> list[str]:
        """The texts of the entries of positions `start` up to `last`."""
        assert self._token_text is not None
        starts = [i for i in range(last) if self._offsets[i] < self._offsets[i + 1]]
        before = [self._ids[self._offsets[i]] for i in starts if i < start]
        stream = self._token_text.stream([*self._context, *before], False)
        texts: list[str] = []
        for i in starts[len(before) :]:
            ids = self._ids[self._offsets[i] : self._offsets[i + 1]]
            texts += map(stream.peek, ids)
            stream.push(ids[:1])
        return texts
