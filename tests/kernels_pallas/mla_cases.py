"""Ragged batches for latent attention, and float64 oracles of what it computes."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np

NOPE, VALUE = 8, 24
"""Sizes of a head's unrotated key and of its value, before absorption."""


@dataclasses.dataclass(frozen=True)
class MlaCase:
    """`rows` are (context length, query tokens) per request, an empty request is (0, 0)."""

    rows: list[tuple[int, int]]
    heads: int = 4
    rank: int = 32
    rope: int = 16
    page_size: int = 16
    dtype: str = "float32"
    decode_only: bool = False
    padding_tokens: int = 0
    seed: int = 0
    pages_per_row: int | None = None

    @property
    def scale(self) -> float:
        return (self.rank + self.rope) ** -0.5


@dataclasses.dataclass(frozen=True)
class MlaBatch:
    """A call's arrays, and the unabsorbed queries and weights that they come from."""

    arrays: tuple[Any, ...]
    q_nope_tnd: np.ndarray
    w_uk_nld: np.ndarray
    w_uv_nlv: np.ndarray
    owned: np.ndarray
    """[T], tokens that belong to a request."""


def make_batch(case: MlaCase) -> MlaBatch:
    """Everything that nobody may read is NaN. Absorbed queries have so few digits that rounding leaves them alone."""
    rng = np.random.default_rng(case.seed)
    size, num_rows, width = case.page_size, len(case.rows), case.rank + case.rope
    pages_per_row = case.pages_per_row
    if pages_per_row is None:
        pages_per_row = max(-(-max(seq_len for seq_len, _ in case.rows) // size), 1) + 1
    num_pages = sum(-(-seq_len // size) for seq_len, _ in case.rows) + 2
    latent_pages = np.full((num_pages, size, width), np.nan)
    free = list(rng.permutation(np.arange(1, num_pages)))
    block_tables = np.full((num_rows, pages_per_row), free.pop(), np.int32)
    seq_lens = np.array([seq_len for seq_len, _ in case.rows], np.int32)
    starts = np.concatenate([[0], np.cumsum([tokens for _, tokens in case.rows])]).astype(np.int32)
    for row, (seq_len, _) in enumerate(case.rows):
        for index in range(-(-seq_len // size)):
            page = block_tables[row, index] = free.pop()
            used = min(size, seq_len - index * size)
            latent_pages[page, :used] = rng.normal(size=(used, width))
    num_tokens = num_rows if case.decode_only else int(starts[-1]) + case.padding_tokens
    q_nope = rng.integers(-4, 5, size=(num_tokens, case.heads, NOPE)) / 4
    w_uk = rng.integers(-1, 2, size=(case.heads, case.rank, NOPE))
    q_latent = np.einsum("tnd,nld->tnl", q_nope, w_uk)
    q_rope = rng.normal(size=(num_tokens, case.heads, case.rope))
    owned = seq_lens > 0 if case.decode_only else np.arange(num_tokens) < starts[-1]
    floats = (jnp.asarray(x, case.dtype) for x in (q_latent, q_rope, latent_pages))
    arrays = (*floats, *(jnp.asarray(x) for x in (block_tables, seq_lens, starts)))
    np.testing.assert_array_equal(exact(arrays[0]), q_latent)
    w_uv = rng.normal(size=(case.heads, case.rank, VALUE)) * case.rank**-0.5
    return MlaBatch(arrays, q_nope, w_uk.astype(np.float64), w_uv, owned)


def exact(array: Any) -> np.ndarray:
    """As float64, via float32 for what numpy does not know."""
    if array.dtype not in (jnp.float32, jnp.float64):
        array = array.astype(jnp.float32)
    return np.asarray(array, np.float64)


def expanded_attention(case: MlaCase, batch: MlaBatch) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Ordinary multi-head attention over keys and values that are expanded from the latents, token by token.

    Returns (values [T, N, V], weighted latents [T, N, L], log-sum-exp [T, N]).
    """
    _, q_rope, pages = (exact(x) for x in batch.arrays[:3])
    block_tables, seq_lens, starts = (np.asarray(x) for x in batch.arrays[3:])
    num_tokens, num_heads = q_rope.shape[:2]
    values_out = np.zeros((num_tokens, num_heads, VALUE))
    latents_out = np.zeros((num_tokens, num_heads, case.rank))
    lse = np.full((num_tokens, num_heads), -np.inf)
    for row, seq_len in enumerate(seq_lens):
        first, last = (row, row + 1) if case.decode_only else (starts[row], starts[row + 1])
        if seq_len == 0 or first == last:
            continue
        slots = np.arange(seq_len)
        cached = pages[block_tables[row, slots // case.page_size], slots % case.page_size]
        latents, k_rope = np.split(cached, [case.rank], axis=1)
        for head in range(num_heads):
            keys = np.concatenate([latents @ batch.w_uk_nld[head], k_rope], axis=1)
            values = latents @ batch.w_uv_nlv[head]
            for token in range(first, last):
                seen = seq_len - last + token + 1
                query = np.concatenate([batch.q_nope_tnd[token, head], q_rope[token, head]])
                score = case.scale * (keys[:seen] @ query)
                weight = np.exp(score - score.max())
                lse[token, head] = score.max() + np.log(weight.sum())
                weight /= weight.sum()
                values_out[token, head] = weight @ values[:seen]
                latents_out[token, head] = weight @ latents[:seen]
    return values_out, latents_out, lse


def errors(case: MlaCase, batch: MlaBatch, out_tnl: Any, lse_tn: Any) -> dict[str, float]:
    """Largest errors: of values and latents relative to the largest of each, of the log-sum-exp as it is."""
    values, latents, lse = expanded_attention(case, batch)
    out = exact(out_tnl)
    pairs = ((np.einsum("tnl,nlv->tnv", out, batch.w_uv_nlv), values), (out, latents))
    relative = [
        float(np.abs(got - expected).max() / max(np.abs(expected).max(), 1e-3))
        for got, expected in pairs
    ]
    lse_out, seen = exact(lse_tn), np.isfinite(lse)
    agrees = np.array_equal(np.isneginf(lse_out), ~seen)
    off = np.abs(lse_out[seen] - lse[seen]).max(initial=0.0) if agrees else np.inf
    return {"values": relative[0], "latents": relative[1], "lse": float(off)}
