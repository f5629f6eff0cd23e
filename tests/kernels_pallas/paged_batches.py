"""Random ragged batches over a paged cache and what attention over them is in float64 numpy."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kernels_pallas import ragged_paged_attention

TOLERANCE = {"float32": 1e-5, "bfloat16": 1e-2, "float16": 1e-2}
MAX_ROWS = 6
QUANTIZED = {"float8_e4m3fn": 60.0, "uint8": 60.0, "int8": 40.0}
"""Spread of the numbers in pages of each type."""


@dataclass(frozen=True)
class Geometry:
    page_size: int
    kv_heads: int
    group: int
    head_size: int
    sliding_window: int | None = None
    soft_cap: float | None = None
    causal: bool = True
    sinks: bool = False
    kv_dtype: str | None = None
    """None: that of the queries."""
    alibi: bool = False

    @property
    def options(self) -> dict[str, Any]:
        return {
            "scale": self.head_size**-0.5,
            "sliding_window": self.sliding_window,
            "soft_cap": self.soft_cap,
            "causal": self.causal,
        }


@dataclass(frozen=True)
class Batch:
    q: np.ndarray
    k_pages: np.ndarray
    v_pages: np.ndarray
    block_tables: np.ndarray
    seq_lens: np.ndarray
    query_start_loc: np.ndarray
    sinks: np.ndarray | None
    kv_scales: tuple[np.ndarray, np.ndarray] | None
    kv_dtype: str | None
    alibi_slopes: np.ndarray | None = None

    def numbers(self, pages: np.ndarray, dtype: str) -> jax.Array:
        """As rounded for the cache, before they are taken as bits."""
        kv_dtype = "float8_e4m3fn" if self.kv_dtype == "uint8" else self.kv_dtype
        return jnp.asarray(pages, kv_dtype or dtype)

    def arrays(self, dtype: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Positional arguments and those by keyword."""
        pages = tuple(self.numbers(pages, dtype) for pages in (self.k_pages, self.v_pages))
        if self.kv_dtype == "uint8":
            pages = tuple(jax.lax.bitcast_convert_type(x, jnp.uint8) for x in pages)
        integers = (self.block_tables, self.seq_lens, self.query_start_loc)
        keywords = jax.tree.map(jnp.asarray, {"sinks": self.sinks, "kv_scales": self.kv_scales})
        if self.alibi_slopes is not None:
            keywords["alibi_slopes"] = jnp.asarray(self.alibi_slopes)
        return (jnp.asarray(self.q, dtype), pages, *map(jnp.asarray, integers)), keywords


def make_batch(
    geometry: Geometry,
    rows: list[tuple[int, int]],
    *,
    tokens: int,
    pages_per_row: int,
    num_pages: int,
    seed: int,
    num_rows: int = MAX_ROWS,
) -> Batch:
    """`rows`: (seq_len, query_len) per real row. What nobody may read is NaN, or large where int8 has no NaN."""
    rng = np.random.default_rng(seed)
    size, kv_dtype = geometry.page_size, geometry.kv_dtype
    shape = (num_pages, geometry.kv_heads, size, geometry.head_size)
    spread = QUANTIZED.get(kv_dtype, 1.0)
    unused = 127.0 if kv_dtype == "int8" else np.nan
    k_pages, v_pages = np.full(shape, unused), np.full(shape, unused)
    free = list(rng.permutation(np.arange(1, num_pages)))
    block_tables = np.full((num_rows, pages_per_row), free.pop(), np.int32)
    seq_lens = np.zeros(num_rows, np.int32)
    query_start_loc = np.zeros(num_rows + 1, np.int32)
    for row, (seq_len, query_len) in enumerate(rows):
        seq_lens[row] = seq_len
        query_start_loc[row + 1] = query_start_loc[row] + query_len
        for index in range(-(-seq_len // size)):
            page = block_tables[row, index] = free.pop()
            used = min(size, seq_len - index * size)
            for pages in (k_pages, v_pages):
                numbers = rng.normal(size=(shape[1], used, shape[3])) * spread
                if kv_dtype == "int8":
                    numbers = np.clip(np.round(numbers), -127, 127)
                pages[page, :, :used] = numbers
    query_start_loc[len(rows) + 1 :] = query_start_loc[len(rows)]
    num_heads = geometry.kv_heads * geometry.group
    q = rng.normal(size=(tokens, num_heads, geometry.head_size))
    sinks = rng.normal(size=num_heads).astype(np.float32) * 2 if geometry.sinks else None
    kv_scales = None
    if kv_dtype is not None:
        kv_scales = tuple(
            (rng.uniform(0.5, 2, geometry.kv_heads) / spread).astype(np.float32) for _ in range(2)
        )
    slopes = np.linspace(0.5, 0.01, num_heads).astype(np.float32) if geometry.alibi else None
    integers = (block_tables, seq_lens, query_start_loc)
    return Batch(q, k_pages, v_pages, *integers, sinks, kv_scales, kv_dtype, slopes)


def oracle(batch: Batch, geometry: Geometry, dtype: str) -> tuple[np.ndarray, np.ndarray]:
    """One request and kv head at a time, from the arrays as rounded to the dtypes under test: results and log-sum-exps."""
    rounded = (
        jnp.asarray(batch.q, dtype),
        batch.numbers(batch.k_pages, dtype),
        batch.numbers(batch.v_pages, dtype),
    )
    q, k_pages, v_pages = (np.asarray(x.astype(jnp.float32), np.float64) for x in rounded)
    size, group = geometry.page_size, geometry.group
    out, lse = np.zeros_like(q), np.full(q.shape[:2], -np.inf)
    for row, seq_len in enumerate(batch.seq_lens):
        first, last = batch.query_start_loc[row], batch.query_start_loc[row + 1]
        if seq_len == 0 or first == last:
            continue
        j = np.arange(seq_len)
        page, offset = batch.block_tables[row, j // size], j % size
        i = np.arange(seq_len - (last - first), seq_len)[:, None]
        seen = j <= i if geometry.causal else np.ones((last - first, seq_len), bool)
        if geometry.sliding_window is not None:
            seen &= j > i - geometry.sliding_window
        for head in range(q.shape[1]):
            kv_head = head // group
            keys, values = k_pages[page, kv_head, offset], v_pages[page, kv_head, offset]
            if batch.kv_scales is not None:
                keys = keys * np.float64(batch.kv_scales[0][kv_head])
                values = values * np.float64(batch.kv_scales[1][kv_head])
            score = q[first:last, head] @ keys.T * geometry.head_size**-0.5
            if geometry.soft_cap is not None:
                score = geometry.soft_cap * np.tanh(score / geometry.soft_cap)
            if batch.alibi_slopes is not None:
                score = score - np.float64(batch.alibi_slopes[head]) * (i - j)
            weight = np.where(seen, np.exp(np.where(seen, score, 0)), 0)
            total = weight.sum(axis=1)
            if batch.sinks is not None:
                total += np.exp(np.float64(batch.sinks[head]))
            out[first:last, head] = weight @ values / total[:, None]
            lse[first:last, head] = np.log(total)
    return out, lse


@functools.cache
def compiled(geometry: Geometry, decode_only: bool, return_lse: bool = False) -> Any:
    return jax.jit(
        functools.partial(
            ragged_paged_attention,
            **geometry.options,
            decode_only=decode_only,
            return_lse=return_lse,
        )
    )


def check(
    batch: Batch,
    geometry: Geometry,
    dtype: str,
    *,
    decode_only: bool = False,
    return_lse: bool = False,
) -> None:
    """Asserts that the default backend agrees with the oracle."""
    arrays, keywords = batch.arrays(dtype)
    out = compiled(geometry, decode_only, return_lse)(*arrays, **keywords)
    check_result(out if return_lse else (out, None), batch, geometry, dtype)


def check_result(
    result: tuple[jax.Array, jax.Array | None], batch: Batch, geometry: Geometry, dtype: str
) -> None:
    out, lse = result
    assert out.dtype == jnp.dtype(dtype)
    out = np.asarray(out.astype(jnp.float32), np.float64)
    expected, expected_lse = oracle(batch, geometry, dtype)
    assert np.isfinite(out).all()
    scale = max(np.abs(expected).max(), 1e-3)
    assert np.abs(out - expected).max() / scale < TOLERANCE[dtype]
    assert not out[batch.query_start_loc[-1] :].any()
    if lse is not None:
        assert lse.dtype == jnp.float32
        lse = np.asarray(lse)
        np.testing.assert_array_equal(np.isfinite(lse), np.isfinite(expected_lse))
        assert (lse[~np.isfinite(lse)] == -np.inf).all()
        finite = np.isfinite(lse)
        if finite.any():
            error = np.abs(lse[finite] - expected_lse[finite]).max()
            assert error / max(np.abs(expected_lse[finite]).max(), 1.0) < TOLERANCE[dtype]
