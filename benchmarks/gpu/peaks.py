"""What the chip reaches: copy bandwidth and the rate of a bfloat16 matrix product, on random numbers."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.gpu.batches import random_array
from benchmarks.gpu.cases import Case, Context
from benchmarks.gpu.timing import settings, time_calls

_PRODUCTS = 4


def cases(context: Context) -> list[Case]:
    return [
        Case("copy", lambda: copy(context), limit=40),
        Case("read", lambda: read(context), limit=20),
        Case("matmul", lambda: matmul(context), limit=40),
    ]


def copy(context: Context) -> dict[str, Any]:
    """Bytes read and written per second, one array to another."""
    source = random_array((context.pick(1 << 30, 1 << 16),), jnp.float32)
    program = jax.jit(jnp.negative).lower(source).compile()
    timing = time_calls(lambda i: program(source), **settings(context.dry))
    return {**timing.values(), "bytes_per_second": 2 * source.nbytes / timing.seconds}


def read(context: Context) -> dict[str, Any]:
    """Bytes per second of one pass that writes next to nothing."""
    source = random_array(context.pick((1 << 16, 1 << 14), (1 << 8, 1 << 6)), jnp.float32)
    program = jax.jit(lambda x: x.max(axis=1)).lower(source).compile()
    timing = time_calls(lambda i: program(source), **settings(context.dry))
    return {**timing.values(), "bytes_per_second": source.nbytes / timing.seconds}


def matmul(context: Context) -> dict[str, Any]:
    """FLOP per second of N x N x N in bfloat16."""
    size = context.pick(8192, 64)
    # Scaled, so that products keep the size of their factors.
    a = random_array((size, size), jnp.bfloat16, size**-0.5)

    def products(x: jax.Array, a: jax.Array) -> jax.Array:
        for _ in range(_PRODUCTS):
            x = x @ a
        return x

    x = random_array((size, size), jnp.bfloat16, seed=1)
    program = jax.jit(products).lower(x, a).compile()
    timing = time_calls(lambda i: program(x, a), calls=_PRODUCTS, **settings(context.dry))
    return {**timing.values(), "flops_per_second": 2 * size**3 / timing.seconds}
