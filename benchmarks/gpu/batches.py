"""Ragged batches over a pool of random pages, made on the device."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


@dataclass(frozen=True)
class Heads:
    """K kv heads with G query heads each, of size H."""

    kv: int
    group: int
    size: int

    @property
    def queries(self) -> int:
        return self.kv * self.group

    def kv_bytes(self, itemsize: int = 2) -> int:
        """Of one token's keys and values."""
        return 2 * self.kv * self.size * itemsize

    def __str__(self) -> str:
        return f"{self.queries}/{self.kv} x {self.size}"


LLAMA_8B = Heads(8, 4, 128)
LLAMA_70B = Heads(8, 8, 128)


_HOST_ELEMENTS = 1 << 24
"""Up to here the host's generator is quicker than compiling one for the device."""


def random_array(
    shape: tuple[int, ...], dtype: Any, deviation: float = 1.0, seed: int = 0
) -> jax.Array:
    """Normal numbers on the device."""
    if math.prod(shape) > _HOST_ELEMENTS:
        return _device_random(shape, jnp.dtype(dtype), deviation, seed)
    return jnp.asarray(host_random(shape, dtype, deviation, seed))


@functools.partial(jax.jit, static_argnums=(0, 1))
def _device_random(
    shape: tuple[int, ...], dtype: Any, deviation: jax.Array, seed: jax.Array
) -> jax.Array:
    """From the generator that costs a GPU least; one program for all seeds."""
    key = jax.random.key(seed, impl="rbg")
    # Not as one array of 32-bit numbers: the largest arrays would not fit beside it.
    bits = jax.random.bits(key, shape, jnp.uint16)
    uniform = (bits.astype(jnp.float32) + 0.5) * np.float32(2**-15) - 1
    return (jax.lax.erf_inv(uniform) * (2**0.5 * deviation)).astype(dtype)


def host_random(
    shape: tuple[int, ...], dtype: Any, deviation: float = 1.0, seed: int = 0
) -> np.ndarray:
    """Normal numbers; large arrays repeat a block, at another place of each page or row."""
    rng, size = np.random.default_rng(seed), math.prod(shape)
    block = rng.standard_normal(min(size, _BLOCK_ELEMENTS), np.float32) * np.float32(deviation)
    return np.resize(block.astype(jnp.dtype(dtype)), shape)


_BLOCK_ELEMENTS = 4_000_037
"""A prime number: no multiple of it is one of a page's size."""


@dataclass(frozen=True)
class Batch:
    """The arrays of one call beside queries and pages, and what they stand for."""

    block_tables: np.ndarray
    seq_lens: np.ndarray
    query_start_loc: np.ndarray
    num_tokens: int

    @property
    def arrays(self) -> tuple[jax.Array, ...]:
        return tuple(
            jnp.asarray(x) for x in (self.block_tables, self.seq_lens, self.query_start_loc)
        )

    @property
    def rows(self) -> list[tuple[int, int]]:
        """(context, query tokens) of the requests."""
        lens = np.diff(self.query_start_loc)
        return [(int(s), int(n)) for s, n in zip(self.seq_lens, lens, strict=True) if n]


def make_batch(
    rows: Sequence[tuple[int, int]],
    *,
    num_pages: int,
    page_size: int,
    pages_per_row: int,
    num_rows: int | None = None,
    num_tokens: int | None = None,
    first_page: int = 0,
    seed: int = 0,
) -> Batch:
    """Requests of (context, query tokens), their pages in random order, padded to `num_rows` and `num_tokens`.

    Pages are handed out from `first_page` of a random order of the pool; a batch that needs more than there are begins
    another order, so that requests then share pages, each at another place of its context.
    """
    num_rows = len(rows) if num_rows is None else num_rows
    needed = [-(-context // page_size) for context, _ in rows]
    orders = -(-(first_page + sum(needed)) // (num_pages - 1)) + 1
    rng = np.random.default_rng(seed)
    pages = np.concatenate([rng.permutation(num_pages - 1) + 1 for _ in range(orders)])[first_page:]
    block_tables = np.zeros((num_rows, pages_per_row), np.int32)
    taken = 0
    for row, count in enumerate(needed):
        block_tables[row, :count] = pages[taken : taken + count]
        taken += count
    seq_lens = np.zeros(num_rows, np.int32)
    seq_lens[: len(rows)] = [context for context, _ in rows]
    lens = [tokens for _, tokens in rows] + [0] * (num_rows - len(rows))
    starts = np.concatenate([[0], np.cumsum(lens)]).astype(np.int32)
    return Batch(
        block_tables, seq_lens, starts, int(starts[-1]) if num_tokens is None else num_tokens
    )


def attention_flops(heads: Heads, rows: Sequence[tuple[int, int]]) -> int:
    """Of causal attention: four per query, key it sees, head and dimension."""
    seen = sum(n * context - n * (n - 1) // 2 for context, n in rows)
    return 4 * heads.queries * heads.size * seen


def attention_bytes(heads: Heads, rows: Sequence[tuple[int, int]], itemsize: int = 2) -> int:
    """Keys and values once, queries and results once (16-bit whatever the cache is)."""
    tokens = sum(n for _, n in rows)
    context = sum(context for context, _ in rows)
    return context * heads.kv_bytes(itemsize) + 2 * tokens * heads.queries * heads.size * 2
