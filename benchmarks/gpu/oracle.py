"""Attention over pages in float64 numpy, for chosen tokens and one kv head at a time; what every kernel is held to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Options:
    """Those of `kernels_pallas.ragged_paged_attention`."""

    scale: float
    sliding_window: int | None = None
    soft_cap: float | None = None
    causal: bool = True
    sinks: np.ndarray | None = None
    kv_scales: tuple[np.ndarray, np.ndarray] | None = None


def float64(array: Any) -> np.ndarray:
    """Any dtype that JAX knows."""
    return np.asarray(array).astype(np.float64)


def attention(
    q_tnh: Any,
    kv_pages: tuple[Any, Any],
    block_tables: np.ndarray,
    seq_lens: np.ndarray,
    query_start_loc: np.ndarray,
    options: Options,
    *,
    tokens: np.ndarray,
    kv_heads: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """Results [len(tokens), len(kv_heads), G, size of values] of some tokens and kv heads, and their log-sum-exps without H.

    Pages stay where they are but for those that the tokens' requests hold.
    """
    page_size, num_kv_heads = kv_pages[0].shape[2], kv_pages[0].shape[1]
    group = q_tnh.shape[1] // num_kv_heads
    head_size = q_tnh.shape[2]
    q = float64(q_tnh[np.asarray(tokens)]).reshape(len(tokens), num_kv_heads, group, head_size)
    out = np.zeros((len(tokens), len(kv_heads), group, kv_pages[1].shape[3]))
    lse = np.full(out.shape[:-1], -np.inf)
    row_of = np.searchsorted(query_start_loc, tokens, side="right") - 1
    for row in np.unique(row_of):
        context = int(seq_lens[row]) if row < len(seq_lens) else 0
        if not context:
            continue
        pages = block_tables[row, : -(-context // page_size)]
        end = int(query_start_loc[row + 1])
        for h, kv_head in enumerate(kv_heads):
            k, v = (
                float64(array[pages, int(kv_head)]).reshape(-1, array.shape[3])[:context]
                for array in kv_pages
            )
            if options.kv_scales is not None:
                k *= float64(options.kv_scales[0])[kv_head]
                v *= float64(options.kv_scales[1])[kv_head]
            for t in np.flatnonzero(row_of == row):
                position = context - end + int(tokens[t])
                first, last = _seen(position, context, options)
                scores = q[t, kv_head] @ k[first:last].T * options.scale
                if options.soft_cap is not None:
                    scores = options.soft_cap * np.tanh(scores / options.soft_cap)
                sink = np.full((group, 1), -np.inf)
                if options.sinks is not None:
                    sink = float64(options.sinks).reshape(num_kv_heads, group)[kv_head][:, None]
                top = np.maximum(scores.max(axis=1, keepdims=True), sink)
                weights = np.exp(scores - top)
                total = weights.sum(axis=1, keepdims=True) + np.exp(sink - top)
                out[t, h] = weights @ v[first:last] / total
                lse[t, h] = (np.log(total) + top)[:, 0]
    return out, lse


def _seen(position: int, context: int, options: Options) -> tuple[int, int]:
    if not options.causal:
        return 0, context
    first = 0
    if options.sliding_window is not None:
        first = max(0, position + 1 - options.sliding_window)
    return first, position + 1


def relative_error(actual: Any, expected: Any) -> float:
    """Of the worst vector along the last axis: ||actual - expected|| / ||expected||; infinite where not finite."""
    actual, expected = float64(actual), float64(expected)
    if actual.shape != expected.shape:
        raise ValueError(f"actual must have the shape {expected.shape}, got {actual.shape}")
    if not np.isfinite(actual).all():
        return float("inf")
    difference = np.linalg.norm(actual - expected, axis=-1)
    return float((difference / np.maximum(np.linalg.norm(expected, axis=-1), 1e-6)).max())


def largest_difference(actual: Any, expected: Any) -> float:
    """Of two arrays that may hold the same infinities."""
    actual, expected = float64(actual), float64(expected)
    equal = actual == expected
    difference = np.abs(np.where(equal, 0.0, actual) - np.where(equal, 0.0, expected))
    return float(np.nan_to_num(difference, nan=np.inf, posinf=np.inf).max())
