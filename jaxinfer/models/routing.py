"""Which experts a token takes, and with what weights; in float32."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxinfer.models.moe_spec import RoutingSpec

Choice = tuple[jax.Array, jax.Array]
"""Experts [T, A] int32, the best first, and their weights [T, A] float32, for A experts per token."""


def route(spec: RoutingSpec, logits_tx: jax.Array, correction_x: jax.Array | None) -> Choice:
    """Chooses by the router's logits [T, X] float32 and, where the spec has it, the correction bias [X]."""
    if spec.logit_soft_cap is not None:
        logits_tx = spec.logit_soft_cap * jnp.tanh(logits_tx / spec.logit_soft_cap)
    if spec.scores == "sparse_mixer":
        return _sparse_mixer(logits_tx, 2 * spec.mixer_jitter)
    softmax = spec.scores == "softmax"
    scores_tx = jax.nn.softmax(logits_tx, axis=-1) if softmax else jax.nn.sigmoid(logits_tx)
    choice_tx = logits_tx if spec.correction_bias == "logits" else scores_tx
    if correction_x is not None:
        choice_tx = choice_tx + correction_x
    if spec.groups_per_token < spec.num_groups:
        choice_tx = jnp.where(_in_best_groups(spec, choice_tx), choice_tx, -jnp.inf)
    _, experts_ta = jax.lax.top_k(choice_tx, spec.experts_per_token)
    weights_ta = jnp.take_along_axis(scores_tx, experts_ta, axis=-1)
    if spec.renormalize:
        weights_ta = weights_ta / jnp.sum(weights_ta, axis=-1, keepdims=True)
    return experts_ta, weights_ta * spec.scale


def _in_best_groups(spec: RoutingSpec, choice_tx: jax.Array) -> jax.Array:
    """[T, X] bool: the experts of the groups that a token may choose from."""
    num_tokens, num_experts = choice_tx.shape
    by_group = choice_tx.reshape(num_tokens, spec.num_groups, -1)
    best = jax.lax.top_k(by_group, 1 if spec.group_score == "best" else 2)[0].sum(axis=-1)
    _, groups = jax.lax.top_k(best, spec.groups_per_token)
    chosen = (groups[:, :, None] == jnp.arange(spec.num_groups)).any(axis=1)
    return jnp.repeat(chosen, num_experts // spec.num_groups, axis=1)


def _sparse_mixer(logits_tx: jax.Array, tolerance: float) -> Choice:
    experts, weights, left_tx = [], [], logits_tx
    for _ in range(2):
        best_t1 = jnp.max(left_tx, axis=-1, keepdims=True)
        size_tx = jnp.maximum(jnp.abs(logits_tx), best_t1)
        near = (best_t1 - logits_tx) / size_tx <= tolerance
        shares_tx = jax.nn.softmax(jnp.where(near, left_tx, -jnp.inf), axis=-1)
        expert_t = jnp.argmax(left_tx, axis=-1)
        experts.append(expert_t)
        weights.append(jnp.take_along_axis(shares_tx, expert_t[:, None], axis=-1)[:, 0])
        taken = expert_t[:, None] == jnp.arange(logits_tx.shape[1])
        left_tx = jnp.where(taken, -jnp.inf, left_tx)
    return jnp.stack(experts, axis=-1), jnp.stack(weights, axis=-1)
