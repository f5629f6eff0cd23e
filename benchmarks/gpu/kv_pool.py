"""One large cache that every timed attention call reads, and the calls' programs, one per padded size."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax

from benchmarks.gpu.batches import Batch, Heads, make_batch, random_array
from benchmarks.gpu.cases import Context
from benchmarks.gpu.timing import Timing, compile_chain, time_chain


@dataclass(frozen=True)
class Pool:
    """Pages of one layer. Requests beyond its size share pages, at random places of their contexts."""

    heads: Heads
    num_pages: int
    page_size: int
    pages_per_row: int
    dtype: str = "bfloat16"

    @functools.cached_property
    def kv_pages(self) -> tuple[jax.Array, ...]:
        pages = self.shapes[0]
        # e4m3 numbers and integers are wanted all over their range.
        deviation = 20.0 if pages.dtype.itemsize == 1 else 1.0
        return tuple(random_array(pages.shape, self.dtype, deviation, seed) for seed in (1, 2))

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
    """`chain` calls of `attend` in one program, each with block tables of its own."""

    attend: Callable[..., Any]
    pool: Pool
    num_rows: int
    num_tokens: int
    group: int
    chain: int
    extra: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments that are arrays."""

    @property
    def _q_shape(self) -> jax.ShapeDtypeStruct:
        heads = self.pool.heads
        return jax.ShapeDtypeStruct(
            (self.num_tokens, heads.kv * self.group, heads.size), "bfloat16"
        )

    @functools.cached_property
    def compiled(self) -> Callable[..., Any]:
        def call(q_tnh: Any, kv_pages: Any, extra: Any, *batch: Any) -> Any:
            return self.attend(q_tnh, kv_pages, *batch, **extra)

        fixed = (self._q_shape, self.pool.shapes, self.extra)
        return compile_chain(call, fixed, self._batch([(1, 1)], 0), self.chain)

    def _batch(self, rows: Sequence[tuple[int, int]], first_page: int) -> tuple[jax.Array, ...]:
        sizes = {"num_rows": self.num_rows, "num_tokens": self.num_tokens}
        return self.pool.batch(rows, first_page=first_page, **sizes).arrays

    def time(self, context: Context, rows: Sequence[tuple[int, int]]) -> Timing:
        pages = sum(-(-tokens // self.pool.page_size) for tokens, _ in rows)
        q_tnh = random_array(self._q_shape.shape, self._q_shape.dtype, 1.0, 3)
        return time_chain(
            self.compiled,
            (q_tnh, self.pool.kv_pages, self.extra),
            lambda i: self._batch(rows, i * pages % (self.pool.num_pages - 1)),
            self.chain,
            sum(tokens for tokens, _ in rows) * self.pool.heads.kv_bytes(),
            context.dry,
        )
