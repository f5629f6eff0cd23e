"""Decode attention: the time of one layer, and the fraction of measured copy bandwidth at which it reads the cache."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp

from benchmarks.gpu import calls, contiguous
from benchmarks.gpu.batches import LLAMA_8B, Heads, attention_bytes
from benchmarks.gpu.cases import Case, Context
from benchmarks.gpu.kv_pool import Pool, Program
from benchmarks.gpu.once import Once

BATCHES = (1, 16, 64, 256)
CONTEXTS = (1024, 4096, 16_384, 131_072)
MOST_TOKENS = 64 * 131_072
"""Of one batch: 256 x 128 k are more than a GPU holds."""
TARGETS = ((64, 4096), (16, 8192), (1, 131_072))
"""(requests, context) with a target: other implementations are timed on these."""
CHAIN = 8
PAGE_SIZE = 64


def cases(context: Context) -> list[Case]:
    timed = Decode(context)
    targets = context.pick(TARGETS, ((2, 24),))
    every = [(b, c) for b in BATCHES for c in CONTEXTS if b * c <= MOST_TOKENS]
    others = context.pick([shape for shape in every if shape not in TARGETS], [(2, 100)])
    return [
        *(timed.case(*shape, 4) for shape in targets),
        *(contiguous.decode_case(context, timed.pool.heads, *shape) for shape in targets),
        *(timed.case(*shape, 4) for shape in others),
        *(timed.case(*shape, 8) for shape in context.pick((*targets, *others), targets)),
        *(timed.case(*shape, 4, cache_dtype="float8_e4m3fn") for shape in targets),
        *(timed.case(*shape, 4, implementation="xla") for shape in targets),
    ]


def attention_pool(context: Context) -> Pool:
    if context.dry:
        return Pool(Heads(2, 4, 32), num_pages=40, page_size=8, pages_per_row=16)
    # 2 M tokens, 8.4 GB; fewer than 2^31 elements each for keys and values.
    pages_per_row = max(CONTEXTS) // PAGE_SIZE
    return Pool(LLAMA_8B, num_pages=32_000, page_size=PAGE_SIZE, pages_per_row=pages_per_row)


class Decode:
    """One program per number of requests, group, cache dtype and implementation, whatever the contexts."""

    def __init__(self, context: Context) -> None:
        self.context, self.pool, self._once = context, attention_pool(context), Once()

    def cache(self, dtype: str) -> tuple[Pool, dict[str, Any]]:
        """The pool in a dtype, and the scales that it needs."""
        if dtype == self.pool.dtype:
            return self.pool, {}
        pool = self._once.get(("pool", dtype), lambda: dataclasses.replace(self.pool, dtype=dtype))
        scales = jnp.full((self.pool.heads.kv,), 0.05, jnp.float32)
        return pool, {"kv_scales": (scales, scales)}

    def program(self, *key: Any) -> Program:
        return self._once.get(key, lambda: self._program(*key))

    def _program(
        self, requests: int, group: int, cache_dtype: str, implementation: str | None
    ) -> Program:
        pool, extra = self.cache(cache_dtype)
        attend = calls.attention(implementation, scale=pool.heads.size**-0.5, decode_only=True)
        # The XLA path is slow enough to be timed call by call.
        chain = 1 if implementation else self.context.pick(CHAIN, 2 if group == 4 else 1)
        return Program(attend, pool, requests, requests, group, chain, extra)

    def case(
        self,
        requests: int,
        tokens: int,
        group: int,
        cache_dtype: str = "bfloat16",
        implementation: str | None = None,
    ) -> Case:
        key = (requests, group, cache_dtype, implementation)

        def compile_() -> Any:
            return self._once.get(("compiled", *key), lambda: self.program(*key).compiled)

        def run() -> dict[str, Any]:
            compile_()
            rows = [(tokens, 1)] * requests
            timing = self.program(*key).time(self.context, rows)
            heads = Heads(self.pool.heads.kv, group, self.pool.heads.size)
            moved = attention_bytes(heads, rows, jnp.dtype(cache_dtype).itemsize)
            floor = moved / self.context.bandwidth
            return {
                **timing.values(),
                "floor_seconds": floor,
                "fraction": floor / timing.seconds,
                "of": "copy bandwidth",
            }

        name = f"{requests} x {tokens}, GQA {group}"
        if cache_dtype != "bfloat16":
            name += ", fp8 cache"
        if implementation:
            name += f", {implementation.upper()}"
        return Case(name, run, compile_, limit=45 if implementation else 30)
