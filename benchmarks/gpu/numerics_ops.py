"""The cache updates' results against float64; see `numerics` for attention."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.gpu import calls, oracle
from benchmarks.gpu.batches import Heads, random_array
from benchmarks.gpu.cases import Case, Context
from kernels_pallas import kv_cache_update, rope_kv_cache_update

TOLERANCE = 1e-2
EIGHT_BIT_TOLERANCE = 8e-2
"""Of vectors of e4m3 numbers, which have three bits after the leading one."""


def cases(context: Context) -> list[Case]:
    heads = context.pick(Heads(8, 4, 128), Heads(2, 2, 32))
    tokens = context.pick(300, 7)
    rope = functools.partial(rope_update, heads, tokens)
    return [
        Case("kv_cache_update", lambda: plain_update(heads, tokens)),
        Case("kv_cache_update fp8", lambda: plain_update(heads, tokens, "float8_e4m3fn")),
        Case("kv_cache_update int8", lambda: plain_update(heads, tokens, "int8")),
        Case("rope_kv_cache_update", rope),
        Case("rope_kv_cache_update QK-norm", lambda: rope(norm=True)),
        Case("rope_kv_cache_update half rotated", lambda: rope(rotated=heads.size // 2)),
        Case("rope_kv_cache_update fp8", lambda: rope(cache_dtype="float8_e4m3fn")),
        Case("rope_kv_cache_update int8", lambda: rope(cache_dtype="int8")),
    ]


PAGE_SIZE = 16


def pages_and_slots(heads: Heads, tokens: int, dtype: str) -> tuple[Any, np.ndarray]:
    """A pair of pages with random contents, and a slot of its own for each token."""
    num_pages = tokens // PAGE_SIZE + 3
    shape = (num_pages, heads.kv, PAGE_SIZE, heads.size)
    deviation = 30.0 if dtype == "int8" else 1.0
    pages = tuple(random_array(shape, dtype, deviation, seed) for seed in (11, 12))
    slots = np.random.default_rng(0).permutation(num_pages * PAGE_SIZE)[:tokens]
    return pages, slots.astype(np.int32)


def scales_of(heads: Heads, dtype: str) -> dict[str, tuple[jax.Array, jax.Array]]:
    """The argument `kv_scales`, where the pages' dtype asks for it."""
    if dtype not in ("int8", "float8_e4m3fn"):
        return {}
    spread = np.linspace(1, 2, heads.kv, dtype=np.float32) * (0.03 if dtype == "int8" else 0.01)
    return {"kv_scales": (jnp.asarray(spread), jnp.asarray(1.5 * spread))}


def check_pages(
    before: Any, after: Any, slots: np.ndarray, new: tuple[np.ndarray, np.ndarray], scales: Any
) -> dict[str, Any]:
    """Written slots hold `new` [T, K, H] (float64, unscaled), every other one what it held."""
    errors = []
    dtype = jnp.dtype(before[0].dtype)
    tolerance = EIGHT_BIT_TOLERANCE if dtype.itemsize == 1 else TOLERANCE
    page, offset = slots // PAGE_SIZE, slots % PAGE_SIZE
    for index in (0, 1):
        old, pages = np.asarray(before[index]), np.asarray(after[index])
        factor = 1.0
        if scales:
            factor = oracle.float64(scales["kv_scales"][index])[None, :, None]
        written = oracle.float64(pages[page, :, offset]) * factor
        errors.append(oracle.relative_error(written, new[index]))
        untouched = np.ones(old.shape[:1] + old.shape[2:3], bool)
        untouched[page, offset] = False
        kept = np.swapaxes(pages, 1, 2)[untouched], np.swapaxes(old, 1, 2)[untouched]
        if kept[0].tobytes() != kept[1].tobytes():
            return {"error": float("inf"), "tolerance": tolerance, "note": "other slots changed"}
    return {"error": max(errors), "tolerance": tolerance}


def plain_update(heads: Heads, tokens: int, dtype: str = "bfloat16") -> dict[str, Any]:
    scales = scales_of(heads, dtype)
    pages, slots = pages_and_slots(heads, tokens, dtype)
    new_dtype = "bfloat16" if scales else dtype
    new = [random_array((tokens, heads.kv, heads.size), new_dtype, 1.0, seed) for seed in (1, 2)]
    run = jax.jit(kv_cache_update)
    after = run(pages, *new, jnp.asarray(slots), **scales)
    return check_pages(pages, after, slots, tuple(map(oracle.float64, new)), scales)


def rope_update(
    heads: Heads,
    tokens: int,
    *,
    norm: bool = False,
    rotated: int | None = None,
    cache_dtype: str = "bfloat16",
) -> dict[str, Any]:
    scales = scales_of(heads, cache_dtype)
    rotated = heads.size if rotated is None else rotated
    pages, slots = pages_and_slots(heads, tokens, cache_dtype)
    qkv = random_array((tokens, heads.kv, heads.group + 2, heads.size), "bfloat16", 1.0, 3)
    angles = np.random.default_rng(1).uniform(0, 6, (tokens, rotated // 2)).astype(np.float32)
    cos, sin = np.cos(angles), np.sin(angles)
    weights = {}
    if norm:
        ones = np.ones(heads.size) + 0.1 * np.random.default_rng(2).normal(size=heads.size)
        weights = {name: jnp.asarray(ones, "bfloat16") for name in ("q_norm", "k_norm")}
    implementation = "mosaic_gpu" if calls.on_gpu() else None
    run = jax.jit(functools.partial(rope_kv_cache_update, implementation=implementation))
    q_tnh, after = run(
        qkv, pages, jnp.asarray(slots), jnp.asarray(cos), jnp.asarray(sin), **weights, **scales
    )
    x = oracle.float64(qkv)
    heads_in, values = x[:, :, :-1], x[:, :, -1]
    if norm:
        heads_in = heads_in / np.sqrt((heads_in**2).mean(axis=-1, keepdims=True) + 1e-6)
        heads_in = heads_in * oracle.float64(weights["q_norm"])
    turned = rotate(heads_in, cos, sin)
    result = check_pages(pages, after, slots, (turned[:, :, -1], values), scales)
    queries = turned[:, :, :-1].reshape(tokens, heads.queries, heads.size)
    q_error = oracle.relative_error(q_tnh, queries)
    if not q_error <= TOLERANCE:
        result["error"] = max(result["error"], q_error)
        result["note"] = "the queries are off"
    return result | {"q_error": q_error}


def rotate(x: np.ndarray, cos: np.ndarray, sin: np.ndarray) -> np.ndarray:
    """The first D elements of the last axis of [T, K, heads, H], each i against i + D / 2."""
    half = cos.shape[1]
    cos, sin = (array.astype(np.float64)[:, None, None] for array in (cos, sin))
    first, second, rest = np.split(x, (half, 2 * half), axis=-1)
    turned = (first * cos - second * sin, second * cos + first * sin, rest)
    return np.concatenate(turned, axis=-1)
