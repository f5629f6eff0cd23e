"""Ragged paged attention in plain JAX: the portable backend, tuned for CPU."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from kernels_pallas.ragged_paged_attention.xla_decode import decode_attention
from kernels_pallas.ragged_paged_attention.xla_prefill import prefill_attention


def ragged_paged_attention(
    q_tnh: jax.Array,
    kv_pages: tuple[jax.Array, jax.Array],
    block_tables: jax.Array,
    seq_lens: jax.Array,
    query_start_loc: jax.Array,
    *,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    decode_only: bool = False,
) -> jax.Array:
    """See `api.ragged_paged_attention`."""
    options = dict(scale=scale, sliding_window=sliding_window, soft_cap=soft_cap)
    if decode_only:
        return decode_attention(q_tnh, kv_pages, block_tables, seq_lens, **options)
    return prefill_attention(q_tnh, kv_pages, block_tables, seq_lens, query_start_loc, **options)
