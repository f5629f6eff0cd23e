"""Attention of one token per request.

The context of every request is cut into chunks of 64 tokens. All chunks that are in use form one flat list, and a loop
takes a block of them at a time: gather their pages, one small dot per (chunk, kv head), and fold the partial softmax
into the request's running one. The trip count follows the contexts that are really there, so neither padding of the
block tables nor unequal lengths cost reads, and the temporaries are those of one block.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from kernels_pallas.quantized_pages import KVScales
from kernels_pallas.ragged_paged_attention.xla_pages import (
    MASKED,
    TOKENS_PER_CHUNK,
    accumulator,
    fold_into_rows,
    log_sum_exp,
    pad_block_tables,
    pages_for,
    read_slots,
    score_scale,
    scores,
    softmax_end,
    softmax_start,
    vary_like,
)

# Chunks per step of the loop: about as many as there are requests, and no more keys than stay in
# the cores' caches until they are used.
_MIN_BLOCK, _MAX_BLOCK = 4, 32
_BLOCK_BYTES = 1 << 20


def decode_attention(
    q_rnh: jax.Array,
    kv_pages: tuple[jax.Array, jax.Array],
    block_tables: jax.Array,
    seq_lens: jax.Array,
    *,
    scale: float,
    sliding_window: int | None,
    soft_cap: float | None,
    sinks: jax.Array | None,
    alibi_slopes: jax.Array | None,
    kv_scales: KVScales | None,
    return_lse: bool,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """q [R, N, H] -> [R, N, H], with return_lse also [R, N]; rows with seq_len 0 are not looked at and give zeros."""
    k_pages, v_pages = kv_pages
    _, num_kv_heads, page_size, head_size = k_pages.shape
    num_rows = block_tables.shape[0]
    chunk_pages = pages_for(TOKENS_PER_CHUNK, page_size, block_tables.shape[1])
    chunk = chunk_pages * page_size
    block_tables = pad_block_tables(block_tables, chunk_pages)
    chunks_per_row = block_tables.shape[1] // chunk_pages
    page_ids = block_tables.reshape(num_rows * chunks_per_row, chunk_pages)
    fitting = _BLOCK_BYTES // (chunk * num_kv_heads * head_size * q_rnh.dtype.itemsize)
    block = min(max(min(num_rows, fitting, _MAX_BLOCK), _MIN_BLOCK), num_rows * chunks_per_row)

    q_rkgh = q_rnh.reshape(num_rows, num_kv_heads, -1, head_size)
    dtype = accumulator(q_rnh.dtype)
    if alibi_slopes is not None:
        slopes_kg = alibi_slopes.astype(dtype).reshape(num_kv_heads, -1)
    key_scale = score_scale(scale, kv_scales)
    window_start = jnp.zeros_like(seq_lens)
    if sliding_window is not None:
        window_start = jnp.maximum(seq_lens - sliding_window, 0)
    first_chunk = window_start // chunk
    num_chunks = (seq_lens + chunk - 1) // chunk - first_chunk
    ends = jnp.cumsum(num_chunks)
    # Item i of the flat list is chunk i - offset[row] of its row.
    offset = ends - num_chunks - first_chunk

    def one_block(step, carry):
        item = step * block + jnp.arange(block, dtype=jnp.int32)
        row = jnp.sum(ends[None, :] <= item[:, None], axis=1, dtype=jnp.int32)
        in_use = row < num_rows
        # Items past the end of the list see nothing, so it does not matter which row gets them.
        row = jnp.minimum(row, num_rows - 1)
        index = jnp.where(in_use, item - offset[row], 0)
        num_valid = jnp.where(in_use, seq_lens[row] - index * chunk, 0)
        pages = page_ids.at[row * chunks_per_row + index].get(mode="promise_in_bounds")
        first_seen = None
        if sliding_window is not None:
            first_seen = window_start[row] - index * chunk
        k_bksh = read_slots(k_pages, pages, num_valid, q_rnh.dtype)
        v_bksh = read_slots(v_pages, pages, num_valid, q_rnh.dtype, first_seen)
        q_bkgh = q_rkgh.at[row].get(mode="promise_in_bounds")
        score_bkgs = scores(q_bkgh, k_bksh, key_scale, soft_cap)
        slot = jnp.arange(chunk, dtype=jnp.int32)
        if alibi_slopes is not None:
            distance_bs = (seq_lens[row] - 1 - index * chunk)[:, None] - slot
            score_bkgs -= slopes_kg[:, :, None] * distance_bs[:, None, None].astype(dtype)
        seen_bs = slot < num_valid[:, None]
        if first_seen is not None:
            seen_bs &= slot >= first_seen[:, None]
        score_bkgs = jnp.where(seen_bs[:, None, None, :], score_bkgs, MASKED)

        def weighted_sum(weight_bkgs):
            return jnp.einsum(
                "bkgs,bksh->bkgh",
                weight_bkgs.astype(v_bksh.dtype),
                v_bksh,
                preferred_element_type=dtype,
            )

        return fold_into_rows(carry, row, score_bkgs, None, weighted_sum)

    heads = q_rkgh.shape[:3]
    sinks_kg = None if sinks is None else sinks.reshape(heads[1:])
    start = softmax_start(heads, head_size, sinks_kg, dtype)
    start = vary_like(start, q_rnh, *kv_pages, block_tables, seq_lens)
    num_blocks = (ends[-1] + block - 1) // block
    peak_rkg, total_rkg, acc_rkgh = lax.fori_loop(0, num_blocks, one_block, start)
    o_rkgh = softmax_end(total_rkg, acc_rkgh, kv_scales)
    o_rnh = o_rkgh.reshape(q_rnh.shape).astype(q_rnh.dtype)
    if not return_lse:
        return o_rnh
    lse_rkg = log_sum_exp(peak_rkg, total_rkg, (seq_lens > 0)[:, None, None])
    return o_rnh, lse_rkg.reshape(o_rnh.shape[:2])
