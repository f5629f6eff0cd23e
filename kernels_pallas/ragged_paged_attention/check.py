"""What a call of ragged paged attention must look like: shapes and dtypes of its arrays, and the numbers in them."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np

from kernels_pallas.quantized_pages import LARGEST, quantized

DTYPES = ("bfloat16", "float16", "float32", "float64")


def check_arrays(
    q_tnh: jax.Array,
    kv_pages: tuple[jax.Array, jax.Array],
    block_tables: jax.Array,
    seq_lens: jax.Array,
    query_start_loc: jax.Array,
    decode_only: bool,
) -> None:
    """Raises `ValueError` for a shape or dtype that doesn't fit the others."""
    _check_queries_and_pages(q_tnh, kv_pages)
    check_rows("q_tnh", q_tnh, block_tables, seq_lens, query_start_loc, decode_only)


def check_rows(
    q_name: str,
    q: jax.Array,
    block_tables: jax.Array,
    seq_lens: jax.Array,
    query_start_loc: jax.Array,
    decode_only: bool,
    *,
    axis: str = "R",
) -> None:
    """Raises `ValueError` where the arrays that describe the rows don't fit one another or the queries [T, ...], which
    the caller names `q_name`; `axis` is the caller's letter for rows."""
    if block_tables.ndim != 2:
        raise ValueError(f"block_tables must have shape [{axis}, P], got {block_tables.shape}")
    num_rows = block_tables.shape[0]
    if seq_lens.shape != (num_rows,):
        raise ValueError(
            f"seq_lens must have shape [{num_rows}] (rows of block_tables), got {seq_lens.shape}"
        )
    if query_start_loc.shape != (num_rows + 1,):
        raise ValueError(
            f"query_start_loc must have shape [{num_rows + 1}] (rows of block_tables, plus one), "
            f"got {query_start_loc.shape}"
        )
    for name, array in (
        ("block_tables", block_tables),
        ("seq_lens", seq_lens),
        ("query_start_loc", query_start_loc),
    ):
        if array.dtype != jnp.int32:
            raise ValueError(f"{name} must be int32, got {array.dtype}")
    if decode_only and q.shape[0] != num_rows:
        raise ValueError(
            f"decode_only needs one token per row: {q_name} {q.shape} has {q.shape[0]} tokens, "
            f"block_tables {block_tables.shape} has {num_rows} rows"
        )


def _check_queries_and_pages(q_tnh: jax.Array, kv_pages: tuple[jax.Array, jax.Array]) -> None:
    if q_tnh.ndim != 3:
        raise ValueError(f"q_tnh must have shape [T, N, H], got {q_tnh.shape}")
    if q_tnh.dtype.name not in DTYPES:
        raise ValueError(f"q_tnh must have a dtype of {DTYPES}, got {q_tnh.dtype}")
    if len(kv_pages) != 2:
        raise ValueError(f"kv_pages must be a pair (k_pages, v_pages), got {len(kv_pages)} items")
    _, num_heads, head_size = q_tnh.shape
    for name, pages in zip(("k_pages", "v_pages"), kv_pages, strict=True):
        if pages.ndim != 4 or pages.shape[3] != head_size:
            raise ValueError(
                f"kv_pages: {name} must have shape [num_pages, K, page_size, {head_size}] "
                f"(the head size of q_tnh {q_tnh.shape}), got {pages.shape}"
            )
        if pages.dtype != q_tnh.dtype and not quantized(pages.dtype):
            raise ValueError(
                f"kv_pages: {name} must have q_tnh's dtype {q_tnh.dtype} or one of "
                f"{tuple(LARGEST)}, got {pages.dtype}"
            )
    k_pages, v_pages = kv_pages
    if k_pages.shape != v_pages.shape or k_pages.dtype != v_pages.dtype:
        raise ValueError(
            f"kv_pages: k_pages {k_pages.dtype} {k_pages.shape} and v_pages {v_pages.dtype} "
            f"{v_pages.shape} must agree in shape and dtype"
        )
    if num_heads % k_pages.shape[1] != 0:
        raise ValueError(
            f"q_tnh {q_tnh.shape} has {num_heads} query heads, which is not a multiple of the "
            f"{k_pages.shape[1]} kv heads of kv_pages {k_pages.shape}"
        )


def check_batch(
    block_tables: np.ndarray,
    seq_lens: np.ndarray,
    query_start_loc: np.ndarray,
    *,
    num_pages: int,
    page_size: int,
    num_tokens: int,
    causal: bool = True,
) -> None:
    """Raises `ValueError` for numbers in a batch's arrays that would be read past what there is.

    Args:
        block_tables, seq_lens, query_start_loc: [R, P], [R] and [R + 1], as attention gets them.
        num_pages, page_size: of the pages.
        num_tokens: T, the queries' tokens.
        causal: as attention gets it; otherwise a request may have more tokens than its context.
    """
    if block_tables.size and not 0 <= block_tables.min() <= block_tables.max() < num_pages:
        row, place = _first((block_tables < 0) | (block_tables >= num_pages))
        raise ValueError(
            f"block_tables must hold pages from 0 to {num_pages - 1}, got "
            f"{block_tables[row, place]} at [{row}, {place}]"
        )
    capacity = block_tables.shape[1] * page_size
    if seq_lens.size and not 0 <= seq_lens.min() <= seq_lens.max() <= capacity:
        (row,) = _first((seq_lens < 0) | (seq_lens > capacity))
        raise ValueError(
            f"seq_lens must be from 0 to {capacity} ({block_tables.shape[1]} pages of {page_size}), "
            f"got {seq_lens[row]} at [{row}]"
        )
    query_lens = np.diff(query_start_loc)
    if query_lens.size and query_lens.min() < 0:
        (row,) = _first(query_lens < 0)
        raise ValueError(
            f"query_start_loc must not decrease, got {query_start_loc[row]} and then "
            f"{query_start_loc[row + 1]} at [{row}]"
        )
    if query_start_loc[0] < 0 or query_start_loc[-1] > num_tokens:
        raise ValueError(
            f"query_start_loc must be from 0 to {num_tokens} (the tokens of q_tnh), got "
            f"{query_start_loc[0]} to {query_start_loc[-1]}"
        )
    if causal and (query_lens > seq_lens).any():
        (row,) = _first(query_lens > seq_lens)
        raise ValueError(
            f"seq_lens must count a request's own tokens: row {row} has {query_lens[row]} in "
            f"query_start_loc, and {seq_lens[row]} in seq_lens"
        )


def _first(wrong: np.ndarray) -> list[int]:
    return np.argwhere(wrong)[0].tolist()


def check_options(
    *, scale: float, sliding_window: int | None, soft_cap: float | None, causal: bool
) -> None:
    """Raises `ValueError` for a number out of range, or options that exclude each other."""
    if not (math.isfinite(scale) and scale > 0):
        raise ValueError(f"scale must be a positive finite number, got {scale}")
    if sliding_window is not None and sliding_window < 1:
        raise ValueError(f"sliding_window must be at least 1 or None, got {sliding_window}")
    if soft_cap is not None and not (math.isfinite(soft_cap) and soft_cap > 0):
        raise ValueError(f"soft_cap must be a positive finite number or None, got {soft_cap}")
    if not causal and sliding_window is not None:
        raise ValueError(
            f"sliding_window must be None with causal=False, which sees whole contexts, "
            f"got {sliding_window}"
        )


def check_head_values(name: str, values: jax.Array | None, num_heads: int) -> None:
    """Raises `ValueError` unless there is one float32 number per query head."""
    if values is not None and (values.shape != (num_heads,) or values.dtype != jnp.float32):
        raise ValueError(
            f"{name} must be float32 [{num_heads}] (the query heads), "
            f"got {values.dtype} {values.shape}"
        )
