"""Which tokens top-k, top-p and min-p leave, without sorting the vocabulary.

All three keep the tokens above some logit, so each row's filter is one threshold, found by a radix
search over the float32 values. Thresholds are sought among the logits before temperature: dividing
may merge neighbouring floats. Probabilities are summed as integers (units of at most 2^-29 of the
total), so that a sum depends neither on its order nor on the shape of the batch.

The search mostly ends among the blocks of 32 tokens with the largest maxima, 4,096 tokens instead
of the whole vocabulary. Every token outside them is at most `bound`, the least of those maxima, so
a threshold above it is the exact one; the rows whose threshold is not are searched again over
everything, a few at a time. Which of the two counts is decided for each row alone: its result can't depend on who
shares the batch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxinfer.executor.radix_search import largest_reaching

BLOCK = 32
"""Tokens per block; the vocabulary axis of the logits is a multiple of it."""

_NEAR_BLOCKS = 128
_ROWS_AT_ONCE = 8


class TokenFilter(NamedTuple):
    """Row r keeps the tokens whose logit is above `threshold[r]`, and those at it with an index up
    to `last[r]`."""

    threshold: jax.Array  # [R] float32
    last: jax.Array  # [R] int32

    def keeps(self, logits: jax.Array, index: jax.Array) -> jax.Array:
        """[R, N] bool for the logits [R, N] of the tokens `index` [R, N]."""
        threshold, last = self.threshold[:, None], self.last[:, None]
        return (logits > threshold) | ((logits == threshold) & (index <= last))


class _Row(NamedTuple):
    """What the search for a nucleus must know of each row; all [R]."""

    peak: jax.Array
    temperature: jax.Array
    threshold: jax.Array
    scale: jax.Array
    target: jax.Array


class _Nucleus(NamedTuple):
    """`needed[r]` of the `ties[r]` tokens at `threshold[r]` complete the mass; all [R]."""

    threshold: jax.Array
    needed: jax.Array
    ties: jax.Array


def block_maxima(logits: jax.Array) -> jax.Array:
    """[R, V / BLOCK] for `logits` [R, V]."""
    return jnp.max(logits.reshape(logits.shape[0], -1, BLOCK), axis=2)


def token_filter(
    logits: jax.Array,
    maxima: jax.Array,
    temperature: jax.Array,
    top_k: jax.Array,
    top_p: jax.Array,
    min_p: jax.Array,
    *,
    near_blocks: int = _NEAR_BLOCKS,
) -> TokenFilter:
    """The filter of `logits` [R, V] with `block_maxima` `maxima`, at `temperature` [R] > 0.

    min_p: keeps at least that fraction of the likeliest token's probability. top_k: keeps the k
    likeliest tokens and all that tie with the last of them (0 is off). top_p: keeps, of what these
    two leave, renormalised, the fewest of the likeliest tokens whose probabilities reach it (the
    lower indices among equally likely ones; 1 is off).
    """
    peak = jnp.max(maxima, axis=1)
    floor = jnp.where(min_p > 0, peak + temperature * jnp.log(min_p), -jnp.inf)
    everything = jnp.full(peak.shape, logits.shape[1] - 1, jnp.int32)

    def search() -> tuple[jax.Array, jax.Array]:
        near, bound = _near(logits, maxima, near_blocks)
        threshold = jnp.maximum(floor, _top_k(logits, near, top_k, near_blocks))
        nucleus = lax.cond(
            jnp.any(top_p < 1),
            lambda: _top_p(logits, near, bound, peak, temperature, threshold, top_p),
            lambda: _Nucleus(threshold, jnp.ones_like(top_k), jnp.ones_like(top_k)),
        )
        cut = nucleus.needed < nucleus.ties
        last = lax.cond(
            jnp.any(cut),
            lambda: jnp.where(cut, _nth_equal(logits, *nucleus[:2]), everything),
            lambda: everything,
        )
        return nucleus.threshold, last

    return TokenFilter(
        *lax.cond(jnp.any((top_k > 0) | (top_p < 1)), search, lambda: (floor, everything))
    )


def _near(logits: jax.Array, maxima: jax.Array, blocks: int) -> tuple[jax.Array, jax.Array]:
    """The logits [R, N] of the blocks with the largest maxima, and the bound [R] of all others."""
    R, B = maxima.shape
    if 2 * blocks >= B:
        return logits, jnp.full((R,), -jnp.inf)
    values, ids = lax.top_k(maxima, blocks)
    near = jnp.take_along_axis(logits.reshape(R, B, BLOCK), ids[:, :, None], axis=1)
    return near.reshape(R, blocks * BLOCK), values[:, -1]


def _top_k(logits: jax.Array, near: jax.Array, top_k: jax.Array, near_blocks: int) -> jax.Array:
    """The k-th largest logit [R], -inf where off."""
    threshold = lax.cond(
        jnp.any(top_k > 0),
        lambda: jnp.where(top_k > 0, largest_reaching(near, None, top_k), -jnp.inf),
        lambda: jnp.full(top_k.shape, -jnp.inf),
    )
    if near.shape == logits.shape:
        return threshold
    # The maxima of the near blocks are that many elements at or above the bound, so the k-th
    # largest of all is the k-th largest of the near ones for every k up to their number.
    return _redo_rows(
        lambda x, k: largest_reaching(x, None, k),
        top_k > near_blocks,
        (logits, top_k),
        threshold,
    )


def _top_p(
    logits: jax.Array,
    near: jax.Array,
    bound: jax.Array,
    peak: jax.Array,
    temperature: jax.Array,
    threshold: jax.Array,
    top_p: jax.Array,
) -> _Nucleus:
    """The nucleus of the tokens at or above `threshold` [R]."""
    on = top_p < 1
    within = threshold > bound  # everything that is left is near

    def weights_of(x: jax.Array, r: _Row) -> jax.Array:
        weights = jnp.exp((x - r.peak[:, None]) / r.temperature[:, None])
        return jnp.where(x >= r.threshold[:, None], weights, 0)

    def units(x: jax.Array, r: _Row) -> jax.Array:
        return jnp.round(weights_of(x, r) * r.scale[:, None]).astype(jnp.int32)

    def over_all(summed: Callable[[jax.Array], jax.Array]) -> jax.Array:
        if near.shape == logits.shape:
            return summed(near)
        far = on & ~within
        return lax.cond(
            jnp.any(far),
            lambda: jnp.where(far, summed(logits), summed(near)),
            lambda: summed(near),
        )

    def find(x: jax.Array, r: _Row) -> _Nucleus:
        weights = units(x, r)
        t = jnp.maximum(largest_reaching(x, weights, r.target), r.threshold)
        above = jnp.sum(jnp.where(x > t[:, None], weights, 0), axis=1)
        ties = jnp.sum(x == t[:, None], axis=1, dtype=jnp.int32)
        one = jnp.maximum(units(t[:, None], r)[:, 0], 1)
        return _Nucleus(t, jnp.clip((r.target - above + one - 1) // one, 1, ties), ties)

    row = _Row(peak, temperature, threshold, jnp.ones_like(peak), jnp.ones(peak.shape, jnp.int32))
    row = row._replace(scale=_scale(over_all(lambda x: jnp.sum(weights_of(x, row), axis=1))))
    total = over_all(lambda x: jnp.sum(units(x, row), axis=1))
    target = jnp.ceil(total.astype(jnp.float32) * top_p).astype(jnp.int32)
    row = row._replace(target=jnp.maximum(target, 1))
    nucleus = find(near, row)
    if near.shape != logits.shape:
        again = on & ~within & ~(nucleus.threshold > bound)
        nucleus = _redo_rows(find, again, (logits, row), nucleus)
    one = jnp.ones_like(nucleus.ties)
    off = _Nucleus(threshold, one, one)
    return jax.tree.map(lambda a, b: jnp.where(on, a, b), nucleus, off)


def _redo_rows[Args, Result](
    f: Callable[..., Result], wanted: jax.Array, args: Args, results: Result
) -> Result:
    """`results`, of leaves [R, ...], with `f(*args)` in the `wanted` [R] rows: some rows at a time,
    so that the cost grows with their number."""
    R = wanted.shape[0]
    size = min(_ROWS_AT_ONCE, R)

    def some(carry: tuple[jax.Array, Result]) -> tuple[jax.Array, Result]:
        wanted, results = carry
        (rows,) = jnp.nonzero(wanted, size=size, fill_value=R)
        redone = f(*jax.tree.map(lambda x: x.at[rows].get(mode="clip"), args))
        put = jax.tree.map(lambda x, y: x.at[rows].set(y, mode="drop"), results, redone)
        return wanted.at[rows].set(False, mode="drop"), put

    return lax.while_loop(lambda carry: jnp.any(carry[0]), some, (wanted, results))[1]


def _scale(total: jax.Array) -> jax.Array:
    """The power of two [R] that carries weights with the sum `total` [R] float32, at least 1, to
    integers that sum to [2^29, 2^30] (rounding adds at most half a unit per token).

    Made from the exponent's bits: `exp2` of a whole number is not exact on CPU.
    """
    exponent = lax.bitcast_convert_type(total, jnp.int32) >> 23
    return lax.bitcast_convert_type((29 + 2 * 127 - exponent) << 23, jnp.float32)


def _nth_equal(logits: jax.Array, value: jax.Array, n: jax.Array) -> jax.Array:
    """The index [R] of the n-th (from 1) element of each row that equals the row's `value`."""
    V = logits.shape[1]
    from_end = (V - lax.broadcasted_iota(jnp.int32, logits.shape, 1)).astype(jnp.float32)
    from_end = jnp.where(logits == value[:, None], from_end, 0)
    return V - largest_reaching(from_end, None, n).astype(jnp.int32)
