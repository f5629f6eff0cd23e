"""The few shapes that a step can have.

A compiled program serves one shape, so every step is padded up to a rung of this ladder. T counts the step's tokens,
R its rows, P the width of its block tables. A step of decodes alone has T = R; otherwise R has its own coarser rungs,
since it only pads small per-row work. A step of decodes whose rows share beginnings has a program of its own. P costs no more than the transfer of the tables (attention loops over the pages
that are in use), so it has one rung up to long contexts.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from jaxinfer.engine.plan import MAX_PREFIX_GROUPS

MIN_ROWS = 2
"""XLA:CPU runs a bfloat16 matmul with a lone row about ten times slower than one with two."""

_COMPUTE_BOUND = 256
"""From about so many tokens on a step takes as long as its tokens need computing, whatever else it does."""


class StepShape(NamedTuple):
    """Padded sizes of a step: T tokens, R rows, P pages per row; `decode_only` when T = R and row r is token r.

    With `num_prefixes`, up to so many groups of rows, the first rows of the step, share their first pages.
    """

    num_tokens: int
    num_rows: int
    num_pages: int
    decode_only: bool
    num_prefixes: int = 0


def _rungs(low: int, high: int, factor: int) -> tuple[int, ...]:
    """low, low * factor, … below `high`, then `high` itself."""
    rungs = []
    while low < high:
        rungs.append(low)
        low *= factor
    return (*rungs, high)


def _token_rungs(low: int, budget: int) -> tuple[int, ...]:
    """Powers of two from `low`, and three quarters of a large `budget`: its last octave is where padding costs most."""
    rungs = _rungs(low, max(budget, low), 2)
    if budget < _COMPUTE_BOUND:
        return rungs
    return tuple(sorted({*rungs, 3 * budget // 4}))


def _at_least(rungs: tuple[int, ...], n: int) -> int:
    return rungs[bisect_left(rungs, n)]


@dataclass(frozen=True)
class BucketLadder:
    """The rungs for an engine: up to `max_num_batched_tokens` tokens, `max_num_seqs` rows, `max_pages` per row.

    Steps of `min_grouped_rows` or more decodes may come in groups that share pages; None: groups are not told apart.
    """

    decode_rows: tuple[int, ...]
    mixed_tokens: tuple[int, ...]
    mixed_rows: tuple[int, ...]
    pages: tuple[int, ...]
    min_grouped_rows: int | None = None
    max_positions: int = 0
    """Most positions that a step with drafts samples at; 0: there are none."""

    @classmethod
    def create(
        cls,
        max_num_batched_tokens: int,
        max_num_seqs: int,
        max_pages: int,
        min_grouped_rows: int | None = None,
        max_drafts: int = 0,
    ) -> BucketLadder:
        """With `max_drafts`, the most in a step, there are rungs for the verification of few rows."""
        rows = max(max_num_seqs, MIN_ROWS)
        fewest_tokens, fewest_rows = (4, MIN_ROWS) if max_drafts else (16, 8)
        return cls(
            decode_rows=_rungs(MIN_ROWS, rows, 2),
            mixed_tokens=_token_rungs(fewest_tokens, max_num_batched_tokens),
            mixed_rows=_rungs(fewest_rows, max(rows, fewest_rows), 8),
            pages=_rungs(512, max_pages, 8),
            min_grouped_rows=min_grouped_rows,
            max_positions=min(rows + max_drafts, max_num_batched_tokens) if max_drafts else 0,
        )

    @classmethod
    def single(cls, num_tokens: int, max_pages: int) -> BucketLadder:
        """One rung: every step, of up to `num_tokens` tokens, has the same shape."""
        tokens = (num_tokens,)
        return cls(decode_rows=(), mixed_tokens=tokens, mixed_rows=tokens, pages=(max_pages,))

    def shape(
        self, num_tokens: int, num_rows: int, num_pages: int, *, grouped: bool = False
    ) -> StepShape:
        """The smallest shape that holds the step; `grouped` when rows of a step of decodes share their first pages."""
        pages = _at_least(self.pages, num_pages)
        if num_tokens == num_rows and self.decode_rows:
            rows = _at_least(self.decode_rows, num_rows)
            grouped = grouped and self._has_groups(rows)
            return StepShape(rows, rows, pages, True, MAX_PREFIX_GROUPS if grouped else 0)
        return StepShape(
            _at_least(self.mixed_tokens, num_tokens),
            _at_least(self.mixed_rows, num_rows),
            pages,
            False,
        )

    def positions(self, num_positions: int) -> int:
        """The rung for a step with drafts that samples at so many positions: that of its tokens if there are no others."""
        return _at_least(self.mixed_tokens, num_positions)

    def all_positions(self) -> tuple[int, ...]:
        """Every rung that `positions` can return."""
        if not self.max_positions:
            return ()
        return self.mixed_tokens[: bisect_left(self.mixed_tokens, self.max_positions) + 1]

    def all_shapes(self) -> Iterator[StepShape]:
        """Every shape that `shape` can return, the largest first."""
        for pages in reversed(self.pages):
            for tokens in reversed(self.mixed_tokens):
                for i, rows in reversed(list(enumerate(self.mixed_rows))):
                    if i == 0 or self.mixed_rows[i - 1] < tokens:
                        yield StepShape(tokens, rows, pages, False)
            for rows in reversed(self.decode_rows):
                yield StepShape(rows, rows, pages, True)
                if self._has_groups(rows):
                    yield StepShape(rows, rows, pages, True, MAX_PREFIX_GROUPS)

    def _has_groups(self, rows: int) -> bool:
        return self.min_grouped_rows is not None and rows >= self.min_grouped_rows
