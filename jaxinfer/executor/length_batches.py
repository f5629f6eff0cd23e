"""Texts of all lengths in a few shapes: sorted, so that little of a batch is padding."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from jaxinfer.config import Device
from jaxinfer.engine.plan import Int32

BATCH_TOKENS = {"cpu": 512, "gpu": 8192}
"""Of a full batch. On a CPU matrices of more rows are multiplied no faster, and texts of fewer are more alike."""


def length_rungs(longest: int) -> list[int]:
    """8, 12, 16, 24, 32, 40, 48, 64, 80, 96, … up to `longest`, which is one itself."""
    rungs, step = [], 8
    while step < longest:
        steps = (step, step * 5 // 4, step * 3 // 2)
        rungs += [rung for rung in steps if rung % min(step // 2, 8) == 0]
        step *= 2
    return [*(rung for rung in rungs if rung < longest), longest]


@dataclass(frozen=True, slots=True)
class LengthBatches:
    """Shapes [B, L]: L one of `lengths`, B a power of two, of no more than `max_texts` and with which the batch has up to
    `batch_tokens` tokens."""

    lengths: tuple[int, ...]
    max_texts: int
    batch_tokens: int

    @classmethod
    def create(cls, longest: int, max_texts: int, device: Device) -> LengthBatches:
        return cls(tuple(length_rungs(longest)), max_texts, BATCH_TOKENS[device])

    def all_shapes(self) -> Iterator[tuple[int, int]]:
        for length in self.lengths:
            rows = 1
            while rows <= self._most_rows(length):
                yield rows, length
                rows *= 2

    def split(self, lengths: Sequence[int]) -> Iterator[tuple[tuple[int, int], Int32]]:
        """Each batch's shape and the indices of its texts, the longest first.

        The last texts go in the smallest batch that holds them all, unless more than a third of it would be empty: then
        the largest that they fill goes first.
        """
        order = np.argsort(-np.asarray(lengths), kind="stable").astype(np.int32)
        rungs = np.asarray(self.lengths)
        start = 0
        while start < len(order):
            length = int(rungs[np.searchsorted(rungs, lengths[order[start]])])
            left = len(order) - start
            rows = self._most_rows(length)
            while rows > left:
                rows //= 2
            if rows < left and 2 * rows <= self._most_rows(length) and 3 * left >= 4 * rows:
                rows *= 2
            yield (rows, length), order[start : start + rows]
            start += rows

    def _most_rows(self, length: int) -> int:
        most = max(min(self.batch_tokens // length, self.max_texts), 1)
        return 1 << most.bit_length() - 1
