"""Latent attention of one token per request.

The context of every request is cut into chunks of 64 tokens. All chunks that are in use form one flat list, and a loop
takes a block of them at a time: gather their pages, one dot of all heads per chunk, and fold the partial softmax into
the request's running one. The trip count follows the contexts that are really there, and the temporaries are those of
one block.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from kernels_pallas.ragged_paged_attention.xla_pages import (
    MASKED,
    TOKENS_PER_CHUNK,
    accumulator,
    fold_into_rows,
    log_sum_exp,
    pad_block_tables,
    pages_for,
    read_slots,
    softmax_end,
    softmax_start,
    vary_like,
)

# Chunks per step of the loop: about as many as there are requests, and no more than stay in the cores' caches.
_MIN_BLOCK, _MAX_BLOCK = 4, 32
_BLOCK_BYTES = 1 << 20


def decode_attention(
    q_bnc: jax.Array,
    latent_pages: jax.Array,
    block_tables: jax.Array,
    seq_lens: jax.Array,
    *,
    scale: float,
) -> tuple[jax.Array, jax.Array]:
    """q [B, N, C] -> weighted rows of the cache [B, N, C] and their log-sum-exp [B, N].

    Rows with seq_len 0 are not looked at and give zeros and -inf.
    """
    _, page_size, width = latent_pages.shape
    num_rows, num_heads, _ = q_bnc.shape
    chunk_pages = pages_for(TOKENS_PER_CHUNK, page_size, block_tables.shape[1])
    chunk = chunk_pages * page_size
    block_tables = pad_block_tables(block_tables, chunk_pages)
    chunks_per_row = block_tables.shape[1] // chunk_pages
    page_ids = block_tables.reshape(num_rows * chunks_per_row, chunk_pages)
    fitting = _BLOCK_BYTES // (chunk * width * latent_pages.dtype.itemsize)
    # Never 1: XLA's CPU backend is slow at batched dots with a batch of 1.
    block = max(min(num_rows, fitting, _MAX_BLOCK), _MIN_BLOCK)
    dtype = accumulator(q_bnc.dtype)
    num_chunks = (seq_lens + chunk - 1) // chunk
    ends = jnp.cumsum(num_chunks)
    begins = ends - num_chunks

    def one_block(step, carry):
        item = step * block + jnp.arange(block, dtype=jnp.int32)
        row = jnp.sum(ends[None, :] <= item[:, None], axis=1, dtype=jnp.int32)
        in_use = row < num_rows
        # Items past the end of the list see nothing, so it does not matter which row gets them.
        row = jnp.minimum(row, num_rows - 1)
        index = jnp.where(in_use, item - begins[row], 0)
        num_valid = jnp.where(in_use, seq_lens[row] - index * chunk, 0)
        pages = page_ids.at[row * chunks_per_row + index].get(mode="promise_in_bounds")
        cached_isc = read_slots(latent_pages[:, None], pages, num_valid, q_bnc.dtype)[:, 0]
        q_inc = q_bnc.at[row].get(mode="promise_in_bounds")
        score_ins = scale * jnp.einsum(
            "inc,isc->ins", q_inc, cached_isc, preferred_element_type=dtype
        )
        seen_is = jnp.arange(chunk, dtype=jnp.int32) < num_valid[:, None]
        seen_ins = seen_is[:, None, :]
        score_ins = jnp.where(seen_ins, score_ins, MASKED)

        def weighted_sum(weight_ins):
            return jnp.einsum(
                "ins,isc->inc",
                weight_ins.astype(cached_isc.dtype),
                cached_isc,
                preferred_element_type=dtype,
            )

        return fold_into_rows(carry, row, score_ins, seen_ins, weighted_sum)

    start = softmax_start((num_rows, num_heads), width, None, dtype)
    start = vary_like(start, q_bnc, latent_pages, block_tables, seq_lens)
    num_blocks = (ends[-1] + block - 1) // block
    peak_bn, total_bn, acc_bnc = lax.fori_loop(0, num_blocks, one_block, start)
    out_bnc = softmax_end(total_bn, acc_bnc, None)
    return out_bnc.astype(q_bnc.dtype), log_sum_exp(peak_bn, total_bn, total_bn > 0)
