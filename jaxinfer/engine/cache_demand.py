"""How many blocks of the KV cache requests hold at once.

A block holds some tokens for one group of layers (`jaxinfer.config.CacheConfig.windows`). In a group that looks back at
all tokens a request holds a block for every column of its block table, in one with a window no more than the window and
the tokens of the step reach into. Requests share the tokens of a step, so what these take is counted once for all.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass

from jaxinfer.config import EngineConfig


@dataclass(frozen=True, slots=True)
class CacheDemand:
    """`limits[g]`: the most columns in which a request holds a block of group g, less those for the tokens of a step;
    None: all. `step_columns`: how many columns a whole step's tokens fill."""

    limits: tuple[int | None, ...]
    step_columns: int

    @classmethod
    def of(cls, config: EngineConfig) -> CacheDemand:
        block_size = config.cache.block_size
        # A row's window and its c tokens reach into at most 1 + ceil((window + c - 2) / block_size) blocks.
        limits = tuple(
            None if window is None else 2 + -(-(window - 1) // block_size)
            for window in config.cache.windows
        )
        return cls(limits, -(-config.scheduler.max_num_batched_tokens // block_size))

    def blocks(self, num_requests: int, num_columns: int) -> int:
        """The most that so many requests of so many columns hold."""
        total = 0
        for limit in self.limits:
            kept = num_columns if limit is None else min(limit, num_columns)
            more = num_requests * (num_columns - kept)
            total += num_requests * kept + min(self.step_columns, more)
        return total

    def num_requests(self, num_blocks: int, num_columns: int) -> float:
        """How many requests of so many columns `num_blocks` are enough for."""
        most = range(1, num_blocks + 1)
        number = bisect_right(most, num_blocks, key=lambda n: self.blocks(n, num_columns))
        held, held_by_more = (self.blocks(n, num_columns) for n in (number, number + 1))
        return number + (num_blocks - held) / (held_by_more - held)

    def most_columns(self, num_blocks: int, limit: int) -> int:
        """Of one request that `num_blocks` are enough for, at most `limit`; 0: of none."""
        fitting = (n for n in range(limit, 0, -1) if self.blocks(1, n) <= num_blocks)
        return next(fitting, 0)
