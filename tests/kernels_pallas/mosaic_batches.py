"""Ragged batches for the Mosaic GPU attention kernels, and float64 attention over them."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np


@dataclasses.dataclass(frozen=True)
class Case:
    """A ragged batch: `rows` are (context length, query tokens) per request, an empty request is (0, 0)."""

    rows: list[tuple[int, int]]
    head_size: int = 64
    kv_heads: int = 1
    group: int = 4
    page_size: int = 16
    dtype: str = "bfloat16"
    page_dtype: str | None = None
    sliding_window: int | None = None
    soft_cap: float | None = None
    causal: bool = True
    sinks: bool = False
    return_lse: bool = False
    decode_only: bool = False
    padding_tokens: int = 0
    left_out: list[int] = dataclasses.field(default_factory=list)
    """Requests that the kernel is told to skip."""
    seed: int = 0

    @classmethod
    def of(cls, fields: dict[str, Any]) -> Case:
        """From what JSON can carry."""
        return cls(**{**fields, "rows": [tuple(row) for row in fields["rows"]]})

    @property
    def pages(self) -> str:
        return self.page_dtype or self.dtype


# So that keys and values come out about as large as normal ones.
_SPREAD = {"float8_e4m3fn": 8.0, "int8": 30.0}


def make_arrays(case: Case) -> tuple[dict[str, Any], dict[str, Any]]:
    """Arrays of the batch by name, and those of its options. What nobody may read is NaN (127 in int8)."""
    rng = np.random.default_rng(case.seed)
    size, num_rows, spread = case.page_size, len(case.rows), _SPREAD.get(case.pages, 1.0)
    num_pages = sum(-(-seq_len // size) for seq_len, _ in case.rows) + 2
    shape = (num_pages, case.kv_heads, size, case.head_size)
    poison = 127 if case.pages == "int8" else np.nan
    k_pages, v_pages = np.full(shape, poison), np.full(shape, poison)
    free = list(rng.permutation(np.arange(1, num_pages)))
    width = max(max(-(-seq_len // size) for seq_len, _ in case.rows), 1) + 1
    block_tables = np.full((num_rows, width), free.pop(), np.int32)
    for row, (seq_len, query_len) in enumerate(case.rows):
        first = 0
        if case.sliding_window is not None:
            first = max(seq_len - query_len + 1 - case.sliding_window, 0)
        for index in range(-(-seq_len // size)):
            page = block_tables[row, index] = free.pop()
            used = min(size, seq_len - index * size)
            # Pages wholly before the window stay poisoned.
            if (index + 1) * size > first:
                for pages in (k_pages, v_pages):
                    pages[page, :, :used] = spread * rng.normal(size=(shape[1], used, shape[3]))
    query_lens = np.array([tokens for _, tokens in case.rows], np.int32)
    starts = np.concatenate([[0], np.cumsum(query_lens)]).astype(np.int32)
    query_lens[case.left_out] = 0
    num_heads = case.kv_heads * case.group
    num_tokens = num_rows if case.decode_only else int(starts[-1]) + case.padding_tokens
    q = rng.normal(size=(num_tokens, num_heads, case.head_size))
    if case.pages == "int8":
        k_pages, v_pages = (np.clip(np.round(x), -128, 127) for x in (k_pages, v_pages))
    arrays = {
        "q": jnp.asarray(q, case.dtype),
        "kv_pages": (jnp.asarray(k_pages, case.pages), jnp.asarray(v_pages, case.pages)),
        "block_tables": jnp.asarray(block_tables),
        "seq_lens": jnp.asarray([seq_len for seq_len, _ in case.rows], jnp.int32),
        "query_start_loc": jnp.asarray(starts),
        "query_lens": jnp.asarray(query_lens),
    }
    options: dict[str, Any] = {}
    if case.sinks:
        options["sinks"] = jnp.asarray(rng.normal(size=num_heads) * 2, jnp.float32)
    if spread != 1.0:
        scales = rng.uniform(0.5, 1.5, size=(2, case.kv_heads)) / spread
        options["kv_scales"] = tuple(jnp.asarray(scales, jnp.float32))
    return arrays, options


def oracle(
    case: Case, arrays: dict[str, Any], options: dict[str, Any]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(out, lse, owned [T]) in float64 numpy from the arrays as rounded; NaN and -inf where nothing is owed."""
    wide = lambda x: np.asarray(x.astype(jnp.float32), np.float64)  # noqa: E731
    q, k_pages, v_pages = wide(arrays["q"]), *map(wide, arrays["kv_pages"])
    k_scale, v_scale = (
        np.asarray(s, np.float64) for s in options.get("kv_scales", np.ones((2, case.kv_heads)))
    )
    tables, starts = np.asarray(arrays["block_tables"]), np.asarray(arrays["query_start_loc"])
    out, lse = np.full(q.shape, np.nan), np.full(q.shape[:2], -np.inf)
    owned = np.zeros(len(q), bool)
    for row, (seq_len, query_len) in enumerate(case.rows):
        if query_len == 0 or row in case.left_out:
            continue
        first = row if case.decode_only else starts[row]
        tokens = slice(first, first + query_len)
        owned[tokens] = True
        if seq_len == 0:
            out[tokens] = 0
            continue
        slots = np.arange(seq_len)
        distance = np.arange(seq_len - query_len, seq_len)[:, None] - slots[None, :]
        seen = np.ones_like(distance, bool)
        if case.causal:
            seen = distance >= 0
        if case.sliding_window is not None:
            seen &= distance < case.sliding_window
        pages = tables[row, slots // case.page_size], slots % case.page_size
        for head in range(q.shape[1]):
            kv_head = head // case.group
            keys = k_pages[pages[0], kv_head, pages[1]] * k_scale[kv_head]
            values = v_pages[pages[0], kv_head, pages[1]] * v_scale[kv_head]
            scores = q[tokens, head] @ keys.T * case.head_size**-0.5
            if case.soft_cap is not None:
                scores = case.soft_cap * np.tanh(scores / case.soft_cap)
            scores = np.where(seen, scores, -np.inf)
            values = np.where(seen.any(0)[:, None], values, 0)
            sink = float(options["sinks"][head]) if case.sinks else -np.inf
            peak = np.maximum(scores.max(1), sink)
            weights = np.exp(scores - peak[:, None])
            total = weights.sum(1) + np.exp(sink - peak)
            out[tokens, head] = weights @ values / total[:, None]
            lse[tokens, head] = peak + np.log(total)
    return out, lse, owned


def compared(
    case: Case,
    arrays: dict[str, Any],
    options: dict[str, Any],
    out: Any,
    lse: Any = None,
    *,
    zeros: bool,
    left_lse: float = -np.inf,
) -> dict[str, Any]:
    """What `mosaic_runs.problem` looks at.

    Args:
        lse: with `case.return_lse`.
        zeros: whether tokens of no request get zeros, or are left as they were, which is NaN. So are those of requests
            that are left out.
        left_lse: what the log-sum-exps of what is left are.
    """
    out = np.asarray(out.astype(jnp.float32), np.float64)
    expected, expected_lse, owned = oracle(case, arrays, options)
    told = owned
    if zeros:
        of_no_request = np.arange(len(out)) >= np.asarray(arrays["query_start_loc"])[-1]
        if case.decode_only:
            of_no_request = np.asarray(arrays["seq_lens"]) == 0
        expected[of_no_request] = 0
        told = owned | of_no_request
    largest = max(np.abs(expected[told]).max(initial=0), 1e-3)
    errors = {"out": [float(np.abs(out[told] - expected[told]).max(initial=0) / largest), 1e-2]}
    holds = {
        "finite": bool(np.isfinite(out[told]).all()),
        "untouched": bool(np.isnan(out[~told]).all()),
    }
    if case.return_lse:
        lse, seen = np.asarray(lse, np.float64), np.isfinite(expected_lse)
        off = np.abs(lse[seen] - expected_lse[seen]).max(initial=0)
        errors["log-sum-exp"] = [float(off), 1e-3]
        holds["-inf where nothing is seen"] = bool(np.isneginf(lse[told][~seen[told]]).all())
        holds["log-sum-exp untouched"] = bool(
            np.array_equal(lse[~told], np.full_like(lse[~told], left_lse), equal_nan=True)
        )
    return {"errors": errors, "holds": holds}
