"""The kernels around the cache: its update, attention over a shared prefix, latent attention."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import kernels_pallas
from benchmarks.gpu import latent, shared_prefix
from benchmarks.gpu.batches import LLAMA_8B, Heads, random_array
from benchmarks.gpu.cases import Case, Context
from benchmarks.gpu.once import Once
from benchmarks.gpu.timing import settings, time_calls

PAGE_SIZE = 64


def cases(context: Context) -> list[Case]:
    tokens = context.pick((64, 256, 8192), (3, 8))
    return [
        *(Update(context, "rope_kv_cache_update", n).case() for n in tokens),
        *shared_prefix.timed_cases(context),
        *latent.timed_cases(context),
        *(Update(context, "kv_cache_update", n).case() for n in tokens[:2]),
    ]


class Update:
    """A chain of updates of one cache, in place; slots and inputs differ from call to call."""

    def __init__(self, context: Context, operation: str, tokens: int) -> None:
        self.context, self.operation, self.tokens = context, operation, tokens
        self.heads = context.pick(LLAMA_8B, Heads(2, 2, 32))
        self.num_pages = context.pick(8192, 8)
        self.chain = context.pick(8, 2)
        self._once = Once()

    def case(self) -> Case:
        return Case(f"{self.operation} of {self.tokens} tokens", self.run, self.compile)

    def arrays(self) -> tuple[Any, list[tuple[jax.Array, ...]]]:
        """The cache, and the inputs of each call."""
        heads, tokens = self.heads, self.tokens
        shape = (self.num_pages, heads.kv, PAGE_SIZE, heads.size)
        pages = tuple(random_array(shape, "bfloat16", 1.0, seed) for seed in (1, 2))
        rng = np.random.default_rng(0)
        slots = [
            jnp.asarray(rng.permutation(self.num_pages * PAGE_SIZE)[:tokens], jnp.int32)
            for _ in range(self.chain)
        ]
        if self.operation == "kv_cache_update":
            new = (tokens, heads.kv, heads.size)
            return pages, [
                (
                    random_array(new, "bfloat16", 1.0, i),
                    random_array(new, "bfloat16", 1.0, 50 + i),
                    slot,
                )
                for i, slot in enumerate(slots)
            ]
        qkv = (tokens, heads.kv, heads.group + 2, heads.size)
        angles = jnp.asarray(rng.uniform(0, 6, (tokens, heads.size // 2)), jnp.float32)
        return pages, [
            (random_array(qkv, "bfloat16", 1.0, i), slot, jnp.cos(angles), jnp.sin(angles))
            for i, slot in enumerate(slots)
        ]

    def compile(self) -> Any:
        return self._once.get("compiled", self._compile)

    def _compile(self) -> Any:
        update = getattr(kernels_pallas, self.operation)

        def run(pages, inputs):
            queries = []
            for arrays in inputs:
                if self.operation == "kv_cache_update":
                    pages = update(pages, *arrays)
                else:
                    qkv, *rest = arrays
                    q_tnh, pages = update(qkv, pages, *rest)
                    queries.append(q_tnh)
            return pages, queries

        shapes = jax.eval_shape(self.arrays)
        return jax.jit(run, donate_argnums=0).lower(*shapes).compile()

    def run(self) -> dict[str, Any]:
        program = self.compile()
        pages, inputs = self.arrays()

        def dispatch(_: int) -> Any:
            nonlocal pages
            pages, queries = program(pages, inputs)
            return queries or pages

        timing = time_calls(dispatch, calls=self.chain, **settings(self.context.dry))
        heads, item = self.heads, 2
        moved = 2 * self.tokens * heads.kv_bytes()
        if self.operation != "kv_cache_update":
            moved += self.tokens * (2 * heads.queries * heads.size * item + 4 * heads.size)
        floor = moved / self.context.bandwidth
        return {
            **timing.values(),
            "floor_seconds": floor,
            "fraction": floor / timing.seconds,
            "of": "copy bandwidth",
        }
