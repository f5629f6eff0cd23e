"""The gated delta rule (arXiv 2412.06464): a state of keys to values, in which a new value replaces what its key finds."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxinfer.models.recurrence import StateRows, recur
from jaxinfer.models.selective_scan import decays, over_groups

_CHUNK = 64
"""Tokens between which [H, 64, 64] products of keys are computed."""
_CHANNELS_CHUNK = 16
"""The same where each channel of a key has its own decay: [H, 16, 16, K]."""

_dot = partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)


class DeltaInputs(NamedTuple):
    """Of T tokens, G keys with Q values each, in float32.

    q, k        [T, G, K], scaled and normalised
    v           [T, G, Q, V]
    log_decay   [T, G, Q, 1], or [T, G, Q, K] for one of each channel; at most 0
    beta        [T, G, Q], how much of what the key finds is replaced
    """

    q: jax.Array
    k: jax.Array
    v: jax.Array
    log_decay: jax.Array
    beta: jax.Array


def gated_delta(
    inputs: DeltaInputs, states: jax.Array, rows: StateRows
) -> tuple[jax.Array, jax.Array]:
    """s = exp(log_decay) s; s = s + k (beta (v - k s))^T; y = q s, per value head: [T, G, Q, V], and `states`
    [S, G, Q, K, V]."""

    def step(inputs: DeltaInputs, s: jax.Array) -> tuple[jax.Array, jax.Array]:
        q, k, v, log_decay, beta = inputs
        q, k = q[:, :, None, :, None], k[:, :, None, :, None]
        s = jnp.exp(log_decay)[..., None] * s
        new = beta[..., None] * (v - (k * s).sum(-2))
        s = s + k * new[..., None, :]
        return (q * s).sum(-2), s

    def chunk(inputs: DeltaInputs, counted: jax.Array, s: jax.Array) -> tuple[jax.Array, jax.Array]:
        counted = counted[:, None, None]
        inputs = inputs._replace(
            log_decay=jnp.where(counted[..., None], inputs.log_decay, 0),
            beta=jnp.where(counted, inputs.beta, 0),
        )
        return over_groups(_delta_group, (inputs, s), (1, 0), (1, 0))

    size = _CHUNK if inputs.log_decay.shape[-1] == 1 else _CHANNELS_CHUNK
    return recur(step, chunk, size, inputs, states, rows)


def _delta_group(inputs: DeltaInputs, s: jax.Array) -> tuple[jax.Array, jax.Array]:
    """A chunk of one key head's values. What each token writes, beta (v - k s), is a linear function of what the tokens
    before it write: one triangular system."""
    q_ck, k_ck, v_cqv, log_decay, beta_cq = inputs
    running = jnp.cumsum(log_decay, axis=0)  # [C, Q, 1 or K]
    decay = jnp.exp(running)
    # [Q, C, K]: a key as the state before the chunk sees it
    q_qck, k_qck = (jnp.moveaxis(decay * x[:, None], 1, 0) for x in (q_ck, k_ck))
    products = partial(_products, running)
    system = jnp.tril(products(k_ck, k_ck) * beta_cq.T[..., None], -1)  # [Q, C, C]
    beta_qc1 = beta_cq.T[..., None]
    rest = beta_qc1 * (jnp.moveaxis(v_cqv, 1, 0) - _dot("qck,qkv->qcv", k_qck, s))
    written = jax.lax.linalg.triangular_solve(
        system, rest, left_side=True, lower=True, unit_diagonal=True
    )
    y = _dot("qck,qkv->cqv", q_qck, s) + _dot("qts,qsv->tqv", products(q_ck, k_ck), written)
    left = jnp.exp(running[-1] - running) * k_ck[:, None]  # [C, Q, K]
    s = decay[-1][..., None] * s + _dot("cqk,qcv->qkv", left, written)
    return y, s


def _products(running: jax.Array, x_ck: jax.Array, k_ck: jax.Array) -> jax.Array:
    """[Q, C, C]: x of token t with the key of token s <= t, decayed from s to t."""
    running = jnp.moveaxis(running, 0, -1)  # [Q, 1 or K, C]
    if running.shape[1] == 1:
        return _dot("tk,sk->ts", x_ck, k_ck) * decays(running[:, 0])
    return _dot("tk,sk,qkts->qts", x_ck, k_ck, decays(running))
