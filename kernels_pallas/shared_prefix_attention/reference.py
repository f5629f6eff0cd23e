"""Attention with shared prefixes the obvious way: as if nothing were shared. For tests."""

from __future__ import annotations

from typing import Any

import jax

from kernels_pallas.ragged_paged_attention.reference import ragged_paged_attention
from kernels_pallas.shared_prefix_attention.prefixes import SharedPrefixes


def shared_prefix_attention(
    q_tnh: jax.Array,
    kv_pages: tuple[jax.Array, jax.Array],
    block_tables: jax.Array,
    seq_lens: jax.Array,
    query_start_loc: jax.Array,
    prefixes: SharedPrefixes,
    **options: Any,
) -> jax.Array:
    """See `api.shared_prefix_attention`. Needs concrete lengths, so it can't be called under jit."""
    del prefixes
    return ragged_paged_attention(
        q_tnh, kv_pages, block_tables, seq_lens, query_start_loc, **options
    )
