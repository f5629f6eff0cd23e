"""Shared beginnings attended to once: the query tokens of a group against its prefix, each request against its rest."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from kernels_pallas.ragged_paged_attention.api import ragged_paged_attention
from kernels_pallas.shared_prefix_attention.merge import merge_attention, merge_pieces
from kernels_pallas.shared_prefix_attention.prefixes import (
    SharedPrefixes,
    prefix_lens_of,
    skip_pages,
    split_prefixes,
)


def shared_prefix_attention(
    q_tnh: jax.Array,
    kv_pages: tuple[jax.Array, jax.Array],
    block_tables: jax.Array,
    seq_lens: jax.Array,
    query_start_loc: jax.Array,
    prefixes: SharedPrefixes,
    *,
    sinks: jax.Array | None,
    decode_only: bool,
    num_splits: int,
    **options: Any,
) -> jax.Array:
    """See `api.shared_prefix_attention`."""
    page_size = kv_pages[0].shape[2]
    starts = query_start_loc[:-1]
    if decode_only:
        starts = jnp.arange(len(seq_lens), dtype=jnp.int32)
    prefix_lens = prefix_lens_of(starts, prefixes)
    # Causality only looks at differences of positions, so the rest of a context is a context.
    rest, rest_lse = ragged_paged_attention(
        q_tnh,
        kv_pages,
        skip_pages(block_tables, prefix_lens // page_size),
        jnp.maximum(seq_lens - prefix_lens, 0),
        query_start_loc,
        sinks=sinks,
        decode_only=decode_only,
        return_lse=True,
        **options,
    )
    prefix, prefix_lse = _attend_to_prefixes(q_tnh, kv_pages, prefixes, num_splits, **options)
    return merge_attention(prefix, prefix_lse, rest, rest_lse)[0]


def _attend_to_prefixes(
    q_tnh: jax.Array,
    kv_pages: tuple[jax.Array, jax.Array],
    prefixes: SharedPrefixes,
    num_splits: int,
    **options: Any,
) -> tuple[jax.Array, jax.Array]:
    """[T, N, H] and the log-sum-exps [T, N], -inf for tokens of no group."""
    options |= {"causal": False, "return_lse": True}
    if num_splits == 1:
        return ragged_paged_attention(q_tnh, kv_pages, *prefixes, **options)
    num_tokens, num_heads, head_size = q_tnh.shape
    pieces = split_prefixes(prefixes, num_tokens, num_splits, kv_pages[0].shape[2])
    copies = jnp.broadcast_to(q_tnh, (num_splits, *q_tnh.shape)).reshape(-1, num_heads, head_size)
    out, lse = ragged_paged_attention(copies, kv_pages, *pieces, **options)
    return merge_pieces(
        out.reshape(num_splits, *q_tnh.shape), lse.reshape(num_splits, num_tokens, num_heads)
    )
