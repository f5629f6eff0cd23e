"""Attention over several pieces of a context, put together."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def merge_attention(
    out_a: jax.Array, lse_a: jax.Array, out_b: jax.Array, lse_b: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Attention over the union of two disjoint sets of keys.

    Args:
        out_a, out_b: [..., H] attention over each of them; anything, NaN included, where there are no keys.
        lse_a, lse_b: [...] log-sum-exps of their scores, -inf for no keys.

    Returns:
        The same of both sets: out in out_a's dtype, zeros where neither has keys.
    """
    return merge_pieces(jnp.stack([out_a, out_b]), jnp.stack([lse_a, lse_b]))


def merge_pieces(out: jax.Array, lse: jax.Array) -> tuple[jax.Array, jax.Array]:
    """`merge_attention` for any number of sets, along the first axis: [A, ..., H] and [A, ...]."""
    peak = lse.max(axis=0)
    # Where there are no keys at all, -inf - -inf would be NaN.
    weight = jnp.exp(lse - jnp.where(peak == -jnp.inf, 0, peak))
    total = weight.sum(axis=0)
    total = jnp.where(total == 0, 1, total)
    out = jnp.where(lse[..., None] == -jnp.inf, 0, out)
    merged = jnp.sum(weight[..., None] * out, axis=0) / total[..., None]
    return merged.astype(out.dtype), peak + jnp.log(total)
