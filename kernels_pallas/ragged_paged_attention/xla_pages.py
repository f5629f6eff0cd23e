"""Reading pages of the KV cache with XLA.

A page of one kv head is S * H contiguous elements, and XLA's CPU backend turns a gather of such rows into block copies
(a gather of whole [K, S, H] pages costs two to four times as much). Selecting valid slots in the same fusion is free,
and it is what makes XLA split the gather over the cores.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from kernels_pallas.quantized_pages import KVScales, widen

MASKED = -1e30
"""Score of a slot that may not be seen: finite, so that differences of two of them are not NaN."""

TOKENS_PER_CHUNK = 64


def pages_for(tokens: int, page_size: int, pages_per_row: int) -> int:
    """How many pages hold `tokens` slots, at least one and at most what a row has."""
    return min(max(tokens // page_size, 1), pages_per_row)


def pad_block_tables(block_tables: jax.Array, multiple: int) -> jax.Array:
    """Block tables [R, P] with page 0 appended until P is a multiple."""
    padding = -block_tables.shape[1] % multiple
    return jnp.pad(block_tables, ((0, 0), (0, padding))) if padding else block_tables


def read_slots(
    pages: jax.Array,
    page_ids: jax.Array,
    num_valid: jax.Array,
    dtype: jnp.dtype,
    first_valid: jax.Array | None = None,
) -> jax.Array:
    """Runs of pages, heads first, with everything but the valid slots replaced by zeros.

    Pages of an 8-bit type are gathered as they are; both types' values are exact in every `dtype` of queries.

    Args:
        pages: [num_pages, K, S, H].
        page_ids: [B, C] int32, C pages of each of B runs.
        num_valid: [B] int32, the slots of a run that count; what the others hold, NaN included, is dropped.
        dtype: of the result.
        first_valid: [B] int32, the first slot of a run that counts; None: 0.

    Returns:
        [B, K, C * S, H].
    """
    num_pages, num_kv_heads, page_size, head_size = pages.shape
    num_runs, run_pages = page_ids.shape
    head = jnp.arange(num_kv_heads, dtype=jnp.int32)
    row_bkc = page_ids[:, None, :] * num_kv_heads + head[:, None]
    rows = pages.reshape(num_pages * num_kv_heads, page_size * head_size)
    data = rows.at[row_bkc].get(mode="promise_in_bounds")
    slot_in_page = jnp.arange(page_size * head_size, dtype=jnp.int32) // head_size
    slot = jnp.arange(run_pages, dtype=jnp.int32)[:, None] * page_size + slot_in_page
    valid = slot < num_valid[:, None, None]
    if first_valid is not None:
        valid &= slot >= first_valid[:, None, None]
    data = jnp.where(valid[:, None], data, 0)
    data = widen(data, dtype)
    return data.reshape(num_runs, num_kv_heads, run_pages * page_size, head_size)


def scores(
    q_bkmh: jax.Array, k_bksh: jax.Array, scale: float | jax.Array, soft_cap: float | None
) -> jax.Array:
    """Scaled, capped scores [B, K, M, S] in float32 (float64 if q is). A scale per head is [K, 1, 1]."""
    result = scale * jnp.einsum(
        "bkmh,bksh->bkms", q_bkmh, k_bksh, preferred_element_type=accumulator(q_bkmh.dtype)
    )
    return result if soft_cap is None else soft_cap * jnp.tanh(result / soft_cap)


def score_scale(scale: float, kv_scales: KVScales | None) -> float | jax.Array:
    """The factor on q . page_value: with scales of the pages one per kv head, [K, 1, 1]."""
    return scale if kv_scales is None else scale * kv_scales[0][:, None, None]


def softmax_start(
    shape: tuple[int, ...], head_size: int, sinks: jax.Array | None, dtype: jnp.dtype
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """An online softmax before its first score: peak, total and weighted sum of values.

    A sink is the first score, one that has no value; `sinks` broadcasts to `shape`. One of -inf counts for nothing.
    """
    if sinks is None:
        peak, total = jnp.full(shape, MASKED, dtype), jnp.zeros(shape, dtype)
    else:
        peak = jnp.maximum(jnp.broadcast_to(sinks, shape).astype(dtype), MASKED)
        total = jnp.ones(shape, dtype)
    return peak, total, jnp.zeros((*shape, head_size), dtype)


def fold(
    softmax: tuple[jax.Array, jax.Array, jax.Array],
    scores: jax.Array,
    dtype: jnp.dtype,
    weighted_sum: Callable[[jax.Array], jax.Array],
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Folds scores [..., S] into online softmaxes [...].

    `weighted_sum` is of the values, by weights like scores that are rounded to `dtype`. The rounded weights are summed
    too: one pass less over the scores.
    """
    peak, total, acc = softmax
    new_peak = jnp.maximum(peak, scores.max(axis=-1))
    weight = jnp.exp(scores - new_peak[..., None]).astype(dtype)
    fade = jnp.exp(peak - new_peak)
    out = weighted_sum(weight)
    total = total * fade + weight.sum(axis=-1, dtype=total.dtype)
    return new_peak, total, acc * fade[..., None] + out


def fold_into_rows(
    softmax: tuple[jax.Array, jax.Array, jax.Array],
    row: jax.Array,
    scores: jax.Array,
    seen: jax.Array | None,
    weighted_sum: Callable[[jax.Array], jax.Array],
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Folds scores [B, ..., S] into the online softmaxes [R, ...] of the rows [B], which are in order.

    Args:
        seen: broadcasts to scores; where it is not set, weights are zero even in rows that have seen nothing but
            `MASKED`. None does without.
        weighted_sum: of the values, by weights like scores.
    """
    peak, total, acc = softmax
    new_peak = peak.at[row].max(
        scores.max(axis=-1), mode="promise_in_bounds", indices_are_sorted=True
    )
    weight = jnp.exp(scores - new_peak.at[row].get(mode="promise_in_bounds")[..., None])
    if seen is not None:
        weight = jnp.where(seen, weight, 0)
    out = weighted_sum(weight)
    fade = jnp.exp(peak - new_peak)
    total = (
        (total * fade)
        .at[row]
        .add(weight.sum(axis=-1), mode="promise_in_bounds", indices_are_sorted=True)
    )
    acc = (
        (acc * fade[..., None]).at[row].add(out, mode="promise_in_bounds", indices_are_sorted=True)
    )
    return new_peak, total, acc


def softmax_end(total: jax.Array, acc: jax.Array, kv_scales: KVScales | None) -> jax.Array:
    """The attended values of an online softmax over [B, K, M] scores: [B, K, M, H]."""
    result = acc / jnp.maximum(total, 1e-30)[..., None]
    return result if kv_scales is None else result * kv_scales[1][:, None, None]


def log_sum_exp(peak: jax.Array, total: jax.Array, sees: jax.Array) -> jax.Array:
    """Of the scores in an online softmax, -inf where `sees` (it broadcasts) is not set."""
    return jnp.where(sees, peak + jnp.log(total), -jnp.inf)


def accumulator(dtype: jnp.dtype) -> jnp.dtype:
    """The type in which scores and sums over values of `dtype` are kept."""
    return jnp.promote_types(dtype, jnp.float32)


def vary_like(arrays: tuple[jax.Array, ...], *references: jax.Array) -> tuple[jax.Array, ...]:
    """Under shard_map, marks constants as differing over the mesh axes over which references do.

    The carry of a loop has to say so from the start. Done by a dependence that XLA folds away, as
    the functions that state it change from one JAX release to the next.
    """
    never = jnp.bool_(False)
    for reference in references:
        never |= (reference[(0,) * reference.ndim] != 0) & False
    return tuple(jnp.where(never, jnp.ones_like(x), x) for x in arrays)
