"""Speculative sampling for drafts that were themselves drawn at random: Leviathan et al. 2023, "Fast Inference from
Transformers via Speculative Decoding"; Chen et al. 2023, "Accelerating Large Language Model Decoding with Speculative
Sampling"."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxinfer.executor.categorical import draw, uniform_pair

_ACCEPTANCE = 0x9E3779B9
"""Sets the numbers that accept apart from those that draw, for the same seed and position."""


def uniforms(seed_high: jax.Array, seed_low: jax.Array, position: jax.Array) -> jax.Array:
    """Three numbers in [0, 1) for each of N positions, [N, 3] float32, from the 64-bit seed of its row and its place in
    the sequence: the first to accept with, the others those that a token would be drawn with anyway."""
    accept = uniform_pair(seed_high ^ jnp.int32(_ACCEPTANCE - (1 << 32)), seed_low, position)
    return jnp.concatenate([accept[:, :1], uniform_pair(seed_high, seed_low, position)], axis=1)


def sample_given_drafts(
    logits: jax.Array, proposals: jax.Array, drafts: jax.Array, u: jax.Array
) -> jax.Array:
    """A token [N] for each position, distributed by softmax(`logits` [N, V]) if `drafts` [N] are by `proposals` [N, V].

    The draft d itself with probability min(1, p(d) / q(d)), else one drawn from norm(max(p - q, 0)), which never is d:
    a draft has been accepted exactly where it comes back. Positions without a draft (-1) draw from p.

    Args:
        logits: what is sampled from, after masks, penalties, temperature and filters (-inf: never).
        proposals: the probabilities that the drafts were drawn with. Anything where there is no draft.
        drafts: int32.
        u: [N, 3], see `uniforms`.
    """
    p = jax.nn.softmax(logits, axis=1)
    has_draft = drafts >= 0
    d = jnp.maximum(drafts, 0)[:, None]
    p_d = jnp.take_along_axis(p, d, axis=1)[:, 0]
    q_d = jnp.take_along_axis(proposals, d, axis=1)[:, 0]
    accept = has_draft & (u[:, 0] * q_d < p_d)
    residual = jnp.where(has_draft[:, None], jnp.maximum(p - proposals, 0), p)
    # Rounding may refuse a draft where p equals q.
    residual = jnp.where(jnp.any(residual > 0, axis=1, keepdims=True), residual, p)
    drawn = draw(lambda weights, _: weights, residual, u[:, 1:])
    return jnp.where(accept, drafts, drawn).astype(jnp.int32)
