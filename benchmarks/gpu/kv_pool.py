"""One large cache that every timed attention call reads, and the calls' programs, one per number of rows."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from benchmarks.gpu.batches import Batch, Heads, make_batch, random_array
from benchmarks.gpu.cases import Context
from benchmarks.gpu.timing import L2_BYTES, Timing, rotating, settings, time_calls

Attend = Callable[..., Any]


@dataclass(frozen=True)
class Pool:
    """Pages of one layer. Requests beyond its size share pages, at random places of their contexts."""

    heads: Heads
    num_pages: int
    page_size: int
    pages_per_row: int
    dtype: str = "bfloat16"

    @functools.cached_property
    def kv_pages(self) -> tuple[jax.Array, jax.Array]:
        shape = self.shapes[0].shape
        if self.shapes[0].dtype.itemsize == 1:
            return tuple(random_array(shape, self.dtype, 20.0, seed) for seed in (1, 2))
        return random_array(shape, self.dtype, 1.0, 1), random_array(shape, self.dtype, 1.0, 2)

    @property
    def shapes(self) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
        shape = (self.num_pages, self.heads.kv, self.page_size, self.heads.size)
        pages = jax.ShapeDtypeStruct(shape, self.dtype)
        return pages, pages

    def batch(self, rows: Sequence[tuple[int, int]], **sizes: Any) -> Batch:
        return make_batch(
            rows,
            num_pages=self.num_pages,
            page_size=self.page_size,
            pages_per_row=self.pages_per_row,
            **sizes,
        )


@dataclass(frozen=True)
class Program:
    """`attend` chained: `chain` calls in one program, each with block tables of its own."""

    attend: Attend
    pool: Pool
    num_rows: int
    num_tokens: int
    group: int
    chain: int
    extra: Any = None
    """Keyword arguments that are arrays, as a tree."""

    @property
    def q_shape(self) -> jax.ShapeDtypeStruct:
        heads = self.pool.heads
        return jax.ShapeDtypeStruct(
            (self.num_tokens, heads.kv * self.group, heads.size), "bfloat16"
        )

    @functools.cached_property
    def compiled(self) -> Callable[..., Any]:
        def run(q_tnh, kv_pages, batches, extra):
            return [self.attend(q_tnh, kv_pages, *batch, **extra) for batch in batches]

        batch = self.pool.batch([(1, 1)], num_rows=self.num_rows, num_tokens=self.num_tokens)
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), batch.arrays)
        arguments = (self.q_shape, self.pool.shapes, [shapes] * self.chain, self.extra or {})
        return jax.jit(run).lower(*arguments).compile()

    def arguments(self, rows: Sequence[tuple[int, int]]) -> list[tuple[Any, ...]]:
        """For as many programs as it takes to read far more than the L2 cache holds."""
        q_tnh = random_array(self.q_shape.shape, self.q_shape.dtype, 1.0, 3)
        context_bytes = sum(context for context, _ in rows) * self.pool.heads.kv_bytes()
        programs = max(1, -(-4 * L2_BYTES // (context_bytes * self.chain)))
        programs = min(programs, 16)
        pages = sum(-(-context // self.pool.page_size) for context, _ in rows)
        sets = []
        for i in range(programs):
            batches = [
                self.pool.batch(
                    rows,
                    num_rows=self.num_rows,
                    num_tokens=self.num_tokens,
                    first_page=(i * self.chain + j) * pages % (self.pool.num_pages - 1),
                ).arrays
                for j in range(self.chain)
            ]
            sets.append((q_tnh, self.pool.kv_pages, batches, self.extra or {}))
        return sets

    def time(self, context: Context, rows: Sequence[tuple[int, int]]) -> Timing:
        dispatch = rotating(self.compiled, self.arguments(rows))
        return time_calls(dispatch, calls=self.chain, **settings(context.dry))
