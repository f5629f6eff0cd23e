"""Attention over a prefix that requests share: its results, and its time beside that of plain attention."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.gpu import calls, oracle
from benchmarks.gpu.batches import LLAMA_8B, Heads, random_array
from benchmarks.gpu.cases import Case, Context
from benchmarks.gpu.once import Once
from benchmarks.gpu.timing import compile_chain, time_chain
from kernels_pallas import SharedPrefixes, shared_prefix_attention

TOLERANCE = 2e-2
CHAIN = 4


@dataclass(frozen=True)
class Shared:
    """`requests` decodes over `prefix` shared tokens and `own` of each."""

    requests: int
    prefix: int
    own: int
    heads: Heads
    page_size: int

    @property
    def context(self) -> int:
        return self.prefix + self.own

    @property
    def num_pages(self) -> int:
        """Of one batch, the padding page included."""
        return 1 + (self.prefix + self.requests * self._padded_own) // self.page_size

    @property
    def _padded_own(self) -> int:
        return -(-self.own // self.page_size) * self.page_size

    def arrays(self, first_page: int = 0) -> tuple[Any, ...]:
        """Block tables, lengths, query starts and the shared pages; pages in random order."""
        own_pages = self._padded_own // self.page_size
        shared_pages = self.prefix // self.page_size
        rng = np.random.default_rng(first_page)
        pages = first_page + 1 + rng.permutation(self.num_pages - 1).astype(np.int32)
        shared, own = pages[:shared_pages], pages[shared_pages:]
        tables = np.hstack(
            [np.tile(shared, (self.requests, 1)), own.reshape(self.requests, own_pages)]
        )
        starts = np.arange(self.requests + 1, dtype=np.int32)
        prefixes = (
            jnp.asarray(tables[:1]),
            jnp.asarray([self.prefix], jnp.int32),
            jnp.asarray([0, self.requests], jnp.int32),
        )
        lens = np.full(self.requests, self.context, np.int32)
        return jnp.asarray(tables), jnp.asarray(lens), jnp.asarray(starts), prefixes

    def pages(self, copies: int) -> tuple[jax.Array, ...]:
        count = 1 + copies * (self.num_pages - 1)
        shape = (count, self.heads.kv, self.page_size, self.heads.size)
        return tuple(random_array(shape, "bfloat16", 1.0, seed) for seed in (1, 2))

    @property
    def queries(self) -> jax.Array:
        return random_array((self.requests, self.heads.queries, self.heads.size), "bfloat16")


def attend(shared: Shared, plain: bool) -> Callable[..., Any]:
    """Takes queries, pages and what `Shared.arrays` makes."""
    scale = shared.heads.size**-0.5
    if plain:
        attention = calls.attention(scale=scale, decode_only=True)
        return lambda q_tnh, kv_pages, *arrays: attention(q_tnh, kv_pages, *arrays[:3])
    options = {"scale": scale, "decode_only": True}
    if calls.on_gpu():
        options["implementation"] = "mosaic_gpu"
    return lambda q_tnh, kv_pages, tables, lens, starts, prefixes: shared_prefix_attention(
        q_tnh, kv_pages, tables, lens, starts, SharedPrefixes(*prefixes), **options
    )


# ---- results


def numeric_cases(context: Context) -> list[Case]:
    real = Shared(24, 1024, 100, LLAMA_8B, 64)
    shared = context.pick(real, Shared(3, 32, 5, Heads(1, 2, 32), 16))
    return [Case("shared prefix", functools.partial(check, shared))]


def check(shared: Shared) -> dict[str, Any]:
    run = jax.jit(attend(shared, plain=False))
    q_tnh, kv_pages, arrays = shared.queries, shared.pages(1), shared.arrays()
    out = np.asarray(run(q_tnh, kv_pages, *arrays))
    tokens, kv_heads = np.arange(shared.requests), np.arange(shared.heads.kv)
    expected, _ = oracle.attention(
        q_tnh,
        jax.tree.map(np.asarray, kv_pages),
        *map(np.asarray, arrays[:3]),
        oracle.Options(shared.heads.size**-0.5),
        tokens=tokens,
        kv_heads=kv_heads,
    )
    return {
        "error": oracle.relative_error(out.reshape(expected.shape), expected),
        "tolerance": TOLERANCE,
    }


# ---- time


def timed_cases(context: Context) -> list[Case]:
    shapes = context.pick(
        (Shared(64, 4096, 128, LLAMA_8B, 64), Shared(256, 4096, 128, LLAMA_8B, 64)),
        (Shared(3, 32, 5, Heads(1, 2, 32), 16),),
    )
    return [Timed(context, shared, plain).case() for shared in shapes for plain in (False, True)]


class Timed:
    def __init__(self, context: Context, shared: Shared, plain: bool) -> None:
        self.context, self.shared, self.plain = context, shared, plain
        self.chain = context.pick(CHAIN, 1)
        self._once = Once()

    def case(self) -> Case:
        what = "plain" if self.plain else "shared prefix"
        name = f"{what}, {self.shared.requests} over {self.shared.prefix}"
        return Case(name, self.run, self.compile)

    def compile(self) -> Any:
        return self._once.get("compiled", self._compile)

    def _compile(self) -> Any:
        call = attend(self.shared, self.plain)
        fixed = jax.eval_shape(lambda: (self.shared.queries, self.shared.pages(self._copies)))
        return compile_chain(call, fixed, self.shared.arrays(), self.chain)

    @property
    def _copies(self) -> int:
        """Batches with pages of their own."""
        return self.context.pick(16, 1)

    def run(self) -> dict[str, Any]:
        shared = self.shared
        program = self.compile()
        stride = shared.num_pages - 1
        own, item = shared.requests * shared.own, shared.heads.kv_bytes()
        moved = (shared.prefix + own) * item
        moved += 4 * shared.requests * shared.heads.queries * shared.heads.size
        timing = time_chain(
            program,
            (shared.queries, shared.pages(self._copies)),
            lambda i: shared.arrays(i % self._copies * stride),
            self.chain,
            moved,
            self.context.dry,
        )
        flops = 4 * shared.requests * shared.heads.queries * shared.heads.size * shared.context
        floor = max(moved / self.context.bandwidth, flops / self.context.matmul)
        return {
            **timing.values(),
            "floor_seconds": floor,
            "fraction": floor / timing.seconds,
            "of": "the prefix read once",
        }
