"""How the query heads and tokens of a request become columns of the decode kernel's matmuls."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels_pallas.ragged_paged_attention.mosaic_gpu.columns import padded_heads

MAX_TOKENS = 8


def _max_columns(head_size: int) -> int:
    """The accumulator of head size 256 takes 128 registers with 64 columns, too many."""
    return 64 if head_size <= 128 else 32


def _up(n: int) -> int:
    return -(-n // 8) * 8


@dataclass(frozen=True, slots=True)
class DecodeShape:
    head_size: int
    group: int
    """Query heads that share an item: those of a kv head, or an equal part of them where they are too many."""
    splits: int
    """Parts of a kv head's query heads."""
    heads: int
    """Columns from one token to the next."""
    tokens: int
    """Most of one request."""

    @classmethod
    def of(cls, group: int, head_size: int, max_tokens: int) -> DecodeShape:
        """For `group` query heads per kv head; tokens is max_tokens or, if that is too many, what fits."""
        most = _max_columns(head_size)
        splits = next(
            n
            for n in range(1, group + 1)
            if group % n == 0 and padded_heads(group // n, head_size) <= most
        )
        heads = padded_heads(group // splits, head_size)
        return cls(
            head_size, group // splits, splits, heads, max(1, min(max_tokens, most // heads))
        )

    @property
    def columns(self) -> int:
        return _up(self.heads * self.tokens)

    @property
    def widths(self) -> tuple[int, ...]:
        """Columns that the loop over keys is made for, so that one token doesn't pay for many.

        Up to 32 columns the difference is small (wgmma takes as long as for 8), and a second loop costs registers.
        """
        return tuple(
            sorted({_up(self.heads), self.columns} if self.columns > 32 else {self.columns})
        )

    @property
    def compiler_params(self) -> Any:
        return plgpu.CompilerParams(
            approx_math=True, reduction_scratch_bytes=reduction_bytes(self.columns)
        )


def reduction_bytes(columns: int) -> int:
    """What the four warps exchange when they reduce [64, columns] over its rows, at most 32 columns at once."""
    return 128 * min(columns, 32)
