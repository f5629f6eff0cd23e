"""State-space recurrences: the selective scan (arXiv 2312.00752) and its form with one decay a head (2405.21060).

Both keep float32 states and read float32 inputs; `dt` is the step size after its softplus.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxinfer.models.recurrence import StateRows, recur

_SCAN_CHUNK = 32
"""Tokens for which the states of a whole layer exist at once: [32, D, N]."""
_HEADS_CHUNK = 128
"""Tokens between which [H, 128, 128] decays are computed."""

_dot = partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)


class ScanInputs(NamedTuple):
    """Of T tokens: x and dt [T, D], b and c [T, N]."""

    x: jax.Array
    dt: jax.Array
    b: jax.Array
    c: jax.Array


def selective_scan(
    inputs: ScanInputs, a: jax.Array, states: jax.Array, rows: StateRows
) -> tuple[jax.Array, jax.Array]:
    """h = exp(dt a) h + dt x b and y = h . c, per channel: [T, D], and `states` [S, D, N].

    Args:
        a: [D, N], negative.
    """

    def terms(inputs: ScanInputs) -> tuple[jax.Array, jax.Array]:
        x, dt, b, _ = inputs
        return jnp.exp(dt[..., None] * a), (dt * x)[..., None] * b[:, None, :]

    def step(inputs: ScanInputs, h: jax.Array) -> tuple[jax.Array, jax.Array]:
        decay, add = terms(inputs)
        h = decay * h + add
        return (h * inputs.c[:, None, :]).sum(-1), h

    def chunk(inputs: ScanInputs, counted: jax.Array, h: jax.Array) -> tuple[jax.Array, jax.Array]:
        inputs = inputs._replace(dt=jnp.where(counted[:, None], inputs.dt, 0))
        decay, add = terms(inputs)
        h_tdn = linear_recurrence(decay, add, h)
        return (h_tdn * inputs.c[:, None, :]).sum(-1), h_tdn[-1]

    return recur(step, chunk, _SCAN_CHUNK, inputs, states, rows)


def linear_recurrence(decay: jax.Array, add: jax.Array, first: jax.Array) -> jax.Array:
    """h_t = decay_t h_(t-1) + add_t elementwise, for every t: [C, ...], given what comes before them [...]."""

    def join(left, right):
        return left[0] * right[0], right[0] * left[1] + right[1]

    add = add.at[0].add(decay[0] * first)
    return jax.lax.associative_scan(join, (decay, add))[1]


class HeadScanInputs(NamedTuple):
    """Of T tokens, G groups of Q heads: x [T, G, Q, P], dt [T, G, Q], and per group b and c [T, G, N]."""

    x: jax.Array
    dt: jax.Array
    b: jax.Array
    c: jax.Array


def head_scan(
    inputs: HeadScanInputs, a: jax.Array, states: jax.Array, rows: StateRows
) -> tuple[jax.Array, jax.Array]:
    """h = exp(dt a) h + dt x b^T and y = h c, per head: [T, G, Q, P], and `states` [S, G, Q, P, N].

    Args:
        a: [G, Q], negative.
    """

    def step(inputs: HeadScanInputs, h: jax.Array) -> tuple[jax.Array, jax.Array]:
        x, dt, b, c = inputs
        decay, scaled = jnp.exp(dt * a), dt[..., None] * x
        h = decay[..., None, None] * h + scaled[..., None] * b[:, :, None, None, :]
        return (h * c[:, :, None, None, :]).sum(-1), h

    def chunk(
        inputs: HeadScanInputs, counted: jax.Array, h: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        inputs = inputs._replace(dt=jnp.where(counted[:, None, None], inputs.dt, 0))
        return over_groups(_scan_group, (inputs, a, h), (1, 0, 0), (1, 0))

    return recur(step, chunk, _HEADS_CHUNK, inputs, states, rows)


def _scan_group(inputs: HeadScanInputs, a: jax.Array, h: jax.Array) -> tuple[jax.Array, jax.Array]:
    """A chunk of one group's heads, whose tokens look at each other instead of at a state."""
    x_cqp, dt_cq, b_cn, c_cn = inputs
    log_decay = jnp.cumsum(dt_cq * a, axis=0).T  # [Q, C]
    scores = _dot("tn,sn->ts", c_cn, b_cn) * decays(log_decay)
    scaled = dt_cq[..., None] * x_cqp
    y = _dot("qts,sqp->tqp", scores, scaled)
    y += _dot("tn,qpn->tqp", c_cn, h) * jnp.exp(log_decay.T)[..., None]
    left = jnp.exp(log_decay[:, -1:] - log_decay)  # [Q, C]
    h = jnp.exp(log_decay[:, -1])[:, None, None] * h
    return y, h + _dot("sqp,sn->qpn", left.T[..., None] * scaled, b_cn)


def decays(log_decay: jax.Array) -> jax.Array:
    """[..., C] running sums to [..., C, C]: what is left at token t of what was there after token s, 0 for s > t."""
    between = log_decay[..., :, None] - log_decay[..., None, :]
    causal = jnp.tri(log_decay.shape[-1], dtype=bool)
    return jnp.where(causal, jnp.exp(jnp.where(causal, between, 0)), 0)


def over_groups(
    function: Callable, args: tuple, in_axes: tuple[int, ...], out_axes: tuple[int, ...]
) -> tuple[jax.Array, ...]:
    """`function` for each entry of the axes; without an axis where it has one entry, as XLA:CPU is slow at batches of
    one matrix product."""
    size = jax.tree.leaves(args[0])[0].shape[in_axes[0]]
    if size > 1:
        return jax.vmap(function, in_axes, out_axes)(*args)
    squeezed = [
        jax.tree.map(partial(jnp.squeeze, axis=i), a) for a, i in zip(args, in_axes, strict=True)
    ]
    out = function(*squeezed)
    return tuple(jnp.expand_dims(o, i) for o, i in zip(out, out_axes, strict=True))
