"""Entry point of attention with shared prefixes: checks the arguments and picks how to do it."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from kernels_pallas.shared_prefix_attention import cascade, reference
from kernels_pallas.shared_prefix_attention.prefixes import SharedPrefixes
from kernels_pallas.trace_target import not_hopper

__all__ = ["SharedPrefixes", "shared_prefix_attention"]

_CORES = 132
"""Of an H100 or H200 (SXM)."""

_MAX_SPLITS = 8
_ROWS_PER_ITEM = 128
"""Of query tokens times heads of a kv head that one thread block of the GPU's prefill kernel takes, about."""


def shared_prefix_attention(
    q_tnh: jax.Array,
    kv_pages: tuple[jax.Array, jax.Array],
    block_tables: jax.Array,
    seq_lens: jax.Array,
    query_start_loc: jax.Array,
    prefixes: SharedPrefixes,
    *,
    scale: float,
    soft_cap: float | None = None,
    sinks: jax.Array | None = None,
    kv_scales: tuple[jax.Array, jax.Array] | None = None,
    decode_only: bool = False,
    num_splits: int | None = None,
    implementation: str | None = None,
) -> jax.Array:
    """`ragged_paged_attention`, causal, which reads the pages that requests share once for all of them.

    The result is the same as without `prefixes`, but for rounding. A group's query tokens are stacked against its
    prefix; each request attends to the rest of its context; the two are merged by their log-sum-exps. A sliding
    window is not taken: it would leave each token another piece of the prefix.

    Args:
        q_tnh: [T, N, H], as are all arguments that are not named here those of `ragged_paged_attention`.
        block_tables: [R, P] int32, the pages of each request, the shared ones too.
        seq_lens: [R] int32, whole contexts, the shared tokens included.
        prefixes: what is shared by whom. That a group's pages are the first of each of its requests is not checked.
        num_splits: cut every prefix into so many pieces that are worked on at once; None: as many as it takes to
            fill a GPU with compute capability 9.0, and 1 elsewhere.
        implementation: "mosaic_gpu" or "xla" for both phases, "reference" for what doesn't know of prefixes; None
            as in `ragged_paged_attention`.

    Returns:
        [T, N, H] in q's dtype.

    Raises:
        ValueError: an argument's shape, dtype or value is not one of the above.
    """
    _check(prefixes, num_splits)
    arrays = (q_tnh, kv_pages, block_tables, seq_lens, query_start_loc, prefixes)
    options = {
        "scale": scale,
        "soft_cap": soft_cap,
        "sinks": sinks,
        "kv_scales": kv_scales,
        "decode_only": decode_only,
    }
    if implementation == "reference":
        return reference.shared_prefix_attention(*arrays, **options)
    return cascade.shared_prefix_attention(
        *arrays,
        num_splits=num_splits or _num_splits(q_tnh, kv_pages[0].shape[1], implementation),
        implementation=implementation,
        **options,
    )


def _num_splits(q_tnh: jax.Array, num_kv_heads: int, implementation: str | None) -> int:
    """Enough thread blocks for all cores, as the prefill kernel does not split contexts."""
    if implementation not in (None, "mosaic_gpu") or not_hopper() is not None:
        return 1
    rows = q_tnh.shape[0] * q_tnh.shape[1] // num_kv_heads
    items = -(-rows // _ROWS_PER_ITEM) * num_kv_heads
    return min(max(_CORES // items, 1), _MAX_SPLITS)


def _check(prefixes: SharedPrefixes, num_splits: int | None) -> None:
    tables, lens, starts = prefixes
    if tables.ndim != 2:
        raise ValueError(f"prefixes.block_tables must have shape [C, P], got {tables.shape}")
    num_groups = tables.shape[0]
    for name, array, length in (
        ("lens", lens, num_groups),
        ("query_start_loc", starts, num_groups + 1),
    ):
        if array.shape != (length,):
            raise ValueError(
                f"prefixes.{name} must have shape [{length}] (for {num_groups} groups of "
                f"prefixes.block_tables), got {array.shape}"
            )
    for name, array in prefixes._asdict().items():
        if array.dtype != jnp.int32:
            raise ValueError(f"prefixes.{name} must be int32, got {array.dtype}")
    if num_splits is not None and num_splits < 1:
        raise ValueError(f"num_splits must be at least 1 or None, got {num_splits}")
