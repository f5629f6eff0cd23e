"""Multi-head latent attention as DeepSeek's models decode it: results and time."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from benchmarks.gpu import calls, oracle
from benchmarks.gpu.batches import make_batch, random_array
from benchmarks.gpu.cases import Case, Context
from benchmarks.gpu.once import Once
from benchmarks.gpu.timing import compile_chain, time_chain
from kernels_pallas import mla_attention

TOLERANCE = 2e-2
CHAIN = 4


@dataclass(frozen=True)
class Latent:
    """Requests of (context, query tokens), N heads over latents of L + R numbers per token."""

    rows: tuple[tuple[int, int], ...]
    heads: int
    rank: int = 512
    rope: int = 64
    page_size: int = 64
    copies: int = 1
    """How many times as many pages there are as one batch needs."""

    @property
    def decode_only(self) -> bool:
        return all(tokens <= 1 for _, tokens in self.rows)

    @property
    def scale(self) -> float:
        # As of heads of 128 + R before absorption.
        return (128 + self.rope) ** -0.5

    @property
    def needed(self) -> int:
        return sum(-(-context // self.page_size) for context, _ in self.rows)

    @property
    def num_tokens(self) -> int:
        return len(self.rows) if self.decode_only else sum(n for _, n in self.rows)

    def batch(self, first_page: int = 0) -> tuple[jax.Array, ...]:
        longest = max(context for context, _ in self.rows)
        return make_batch(
            self.rows,
            num_pages=self.num_pages,
            page_size=self.page_size,
            pages_per_row=-(-longest // self.page_size),
            first_page=first_page,
        ).arrays

    @property
    def num_pages(self) -> int:
        return 1 + self.copies * self.needed

    def arrays(self) -> tuple[jax.Array, ...]:
        """Queries, their rotated parts, pages."""
        shape = (self.num_tokens, self.heads)
        return (
            random_array((*shape, self.rank), "bfloat16", 1.0, 1),
            random_array((*shape, self.rope), "bfloat16", 1.0, 2),
            random_array(
                (self.num_pages, self.page_size, self.rank + self.rope), "bfloat16", 1.0, 3
            ),
        )

    def call(self) -> Callable[..., Any]:
        return functools.partial(
            mla_attention,
            scale=self.scale,
            decode_only=self.decode_only,
            implementation="mosaic_gpu" if calls.on_gpu() else None,
        )


# ---- results


def numeric_cases(context: Context) -> list[Case]:
    decodes = ((1, 1), (64, 1), (700, 1), (3000, 1))
    mixed = ((900, 1), (400, 300), (9, 9))
    tiny = {"rank": 64, "rope": 16, "page_size": 16}
    shapes = context.pick(
        {
            "MLA decode, 16 heads": Latent(decodes, 16),
            "MLA decode, 128 heads": Latent(decodes, 128),
            "MLA mixed, 16 heads": Latent(mixed, 16),
        },
        {"MLA mixed": Latent(((20, 1), (30, 4)), 4, **tiny)},
    )
    return [Case(name, functools.partial(check, latent)) for name, latent in shapes.items()]


def check(latent: Latent) -> dict[str, Any]:
    q_latent, q_rope, pages = latent.arrays()
    batch = latent.batch()
    out = np.asarray(jax.jit(latent.call())(q_latent, q_rope, pages, *batch))
    # Attention of one kv head whose values are its keys' first elements.
    keys = np.asarray(pages)[:, None]
    tokens = np.arange(latent.num_tokens)
    expected, _ = oracle.attention(
        np.concatenate([np.asarray(q_latent), np.asarray(q_rope)], axis=-1),
        (keys, keys[..., : latent.rank]),
        *map(np.asarray, batch),
        oracle.Options(latent.scale),
        tokens=tokens,
        kv_heads=np.array([0]),
    )
    return {"error": oracle.relative_error(out, expected[:, 0]), "tolerance": TOLERANCE}


# ---- time


def timed_cases(context: Context) -> list[Case]:
    tiny = {"rank": 64, "rope": 16, "page_size": 16}
    shapes = context.pick(
        (
            Latent(((4096, 1),) * 64, 16, copies=4),
            Latent(((4096, 1),) * 64, 128, copies=4),
            Latent(((131_072, 1),), 16, copies=4),
        ),
        (Latent(((40, 1),) * 2, 4, **tiny),),
    )
    return [Timed(context, latent).case() for latent in shapes]


class Timed:
    def __init__(self, context: Context, latent: Latent) -> None:
        self.context, self.latent = context, latent
        self.chain = context.pick(CHAIN, 1)
        self._once = Once()

    def case(self) -> Case:
        rows = self.latent.rows
        name = f"MLA decode, {len(rows)} x {rows[0][0]}, {self.latent.heads} heads"
        return Case(name, self.run, self.compile)

    def compile(self) -> Any:
        return self._once.get("compiled", self._compile)

    def _compile(self) -> Any:
        fixed = jax.eval_shape(self.latent.arrays)
        return compile_chain(self.latent.call(), fixed, self.latent.batch(), self.chain)

    def run(self) -> dict[str, Any]:
        latent = self.latent
        program = self.compile()
        context = sum(tokens for tokens, _ in latent.rows)
        width = latent.rank + latent.rope
        moved = 2 * (context * width + latent.num_tokens * latent.heads * (width + latent.rank))
        timing = time_chain(
            program,
            latent.arrays(),
            lambda i: latent.batch(i % latent.copies * latent.needed),
            self.chain,
            moved,
            self.context.dry,
        )
        flops = 2 * context * latent.heads * (width + latent.rank)
        transfers, products = moved / self.context.bandwidth, flops / self.context.matmul
        floor = max(transfers, products)
        return {
            **timing.values(),
            "floor_seconds": floor,
            "fraction": floor / timing.seconds,
            "of": "copy bandwidth" if transfers >= products else "matmul peak",
        }
