"""Logprobs as arrays, for those who ask for many: reading them as dicts costs what a dict costs, and only then."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, overload

import numpy as np
import numpy.typing as npt

from jaxinfer.outputs import Logprob, PositionLogprobs

type Decode = Callable[[], Sequence[str | None]]


class FlatLogprobs(Sequence[PositionLogprobs | None]):
    """Logprobs of P positions. Its items are the dicts that a list of logprobs would hold, made when they are asked for.

    The entries of position i are `offsets[i]` up to `offsets[i + 1]` of the arrays: the chosen token, then the
    candidates, among which it may be once more. A position without entries (the prompt's first) reads as None.
    A `ranks` of 0 says that the rank is not known.

    Args:
        token_ids: [N] int32
        logprobs: [N] float32
        ranks: [N] int32
        offsets: [P + 1] int64
        decode: gives the text of each of the N entries, once somebody reads it; None for a request without text.
    """

    __slots__ = ("_decode", "_decoded", "logprobs", "offsets", "ranks", "token_ids")

    def __init__(
        self,
        token_ids: npt.NDArray[np.int32],
        logprobs: npt.NDArray[np.float32],
        ranks: npt.NDArray[np.int32],
        offsets: npt.NDArray[np.int64],
        decode: Decode | None = None,
    ) -> None:
        self.token_ids = token_ids
        self.logprobs = logprobs
        self.ranks = ranks
        self.offsets = offsets
        self._decode = decode
        self._decoded: list[str | None] | None = None

    @property
    def decoded_tokens(self) -> list[str | None]:
        """[N], see `Logprob.decoded_token`. Worked out when first read."""
        if self._decoded is None:
            texts = [None] * len(self.token_ids) if self._decode is None else self._decode()
            self._decoded, self._decode = list(texts), None
        return self._decoded

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @overload
    def __getitem__(self, index: int) -> PositionLogprobs | None: ...
    @overload
    def __getitem__(self, index: slice) -> FlatLogprobs: ...
    def __getitem__(self, index: int | slice) -> PositionLogprobs | FlatLogprobs | None:
        if isinstance(index, slice):
            return self._slice(index)
        return self._position(range(len(self))[index])

    def __iter__(self) -> Iterator[PositionLogprobs | None]:
        return map(self._position, range(len(self)))

    def __add__(self, later: FlatLogprobs) -> FlatLogprobs:
        return FlatLogprobs(
            np.concatenate([self.token_ids, later.token_ids]),
            np.concatenate([self.logprobs, later.logprobs]),
            np.concatenate([self.ranks, later.ranks]),
            np.concatenate([self.offsets, later.offsets[1:] + self.offsets[-1]]),
            lambda: self.decoded_tokens + later.decoded_tokens,
        )

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, FlatLogprobs):
            return NotImplemented
        names = ("token_ids", "logprobs", "ranks", "offsets")
        return all(np.array_equal(getattr(self, name), getattr(other, name)) for name in names)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"FlatLogprobs({len(self)} positions, {len(self.token_ids)} logprobs)"

    def __reduce__(self) -> tuple[Any, ...]:
        arrays = (self.token_ids, self.logprobs, self.ranks, self.offsets)
        return _rebuild, (*arrays, self.decoded_tokens)

    def _slice(self, index: slice) -> FlatLogprobs:
        start, stop, step = index.indices(len(self))
        if step != 1:
            raise ValueError(f"FlatLogprobs can be sliced with a step of 1 only, got {step}.")
        stop = max(start, stop)
        first, last = int(self.offsets[start]), int(self.offsets[stop])
        return FlatLogprobs(
            self.token_ids[first:last],
            self.logprobs[first:last],
            self.ranks[first:last],
            self.offsets[start : stop + 1] - first,
            lambda: self.decoded_tokens[first:last],
        )

    def _position(self, index: int) -> PositionLogprobs | None:
        first, last = int(self.offsets[index]), int(self.offsets[index + 1])
        if first == last:
            return None
        entries: PositionLogprobs = {}
        columns = zip(
            self.token_ids[first:last].tolist(),
            self.logprobs[first:last].tolist(),
            self.ranks[first:last].tolist(),
            self.decoded_tokens[first:last],
            strict=True,
        )
        for token_id, logprob, rank, text in columns:
            if token_id not in entries:
                entries[token_id] = Logprob(logprob, rank or None, text)
        return entries


def _rebuild(
    token_ids: npt.NDArray[np.int32],
    logprobs: npt.NDArray[np.float32],
    ranks: npt.NDArray[np.int32],
    offsets: npt.NDArray[np.int64],
    decoded: list[str | None],
) -> FlatLogprobs:
    return FlatLogprobs(token_ids, logprobs, ranks, offsets, lambda: decoded)
