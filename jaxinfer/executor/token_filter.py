"""Which tokens top-k, top-p and min-p leave, without sorting the vocabulary.

All three keep the tokens above some logit, so each row's filter is one threshold, found by bisection over the float32
values (by their order-preserving integer images, at most 32 passes, fewer when the interval holds a single value).
Thresholds are sought among the logits before temperature: dividing may merge neighbouring floats.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

_LOWEST = -0x7F800001
"""The image of -inf."""


class TokenFilter(NamedTuple):
    """Row r keeps the tokens whose logit is above `threshold[r]`, and those at it with an index up to `last[r]`."""

    threshold: jax.Array  # [R] float32
    last: jax.Array  # [R] int32

    def keeps(self, logits: jax.Array, index: jax.Array) -> jax.Array:
        """[R, N] bool for the logits [R, N] of the tokens `index` [R, N]."""
        threshold, last = self.threshold[:, None], self.last[:, None]
        return (logits > threshold) | ((logits == threshold) & (index <= last))


def token_filter(
    logits: jax.Array,
    peak: jax.Array,
    temperature: jax.Array,
    top_k: jax.Array,
    top_p: jax.Array,
    min_p: jax.Array,
) -> TokenFilter:
    """The filter of `logits` [R, V], whose largest values are `peak` [R], at `temperature` [R] > 0.

    min_p: at least that fraction of the likeliest token's probability. top_k: the k likeliest tokens and all that tie
    with the last of them (0 is off). top_p: of what these two leave, renormalised, the fewest of the likeliest tokens
    whose probabilities reach it (the lower indices among equally likely ones; 1 is off).
    """
    V = logits.shape[1]
    threshold = jnp.where(min_p > 0, peak + temperature * jnp.log(min_p), -jnp.inf)

    def with_top_k(threshold: jax.Array) -> jax.Array:
        def at_least_k(t: jax.Array) -> jax.Array:
            return jnp.sum(logits >= t[:, None], axis=1, dtype=jnp.int32) >= top_k

        return jnp.maximum(threshold, _largest(at_least_k, peak, top_k == 0))

    threshold = lax.cond(jnp.any(top_k > 0), with_top_k, lambda t: t, threshold)
    last = jnp.full_like(top_k, V - 1)

    def with_top_p(threshold: jax.Array) -> tuple[jax.Array, jax.Array]:
        weights = jnp.exp((logits - peak[:, None]) / temperature[:, None])
        weights = jnp.where(logits >= threshold[:, None], weights, 0)

        def mass(t: jax.Array) -> jax.Array:
            return jnp.sum(jnp.where(logits >= t[:, None], weights, 0), axis=1)

        target = top_p * mass(threshold)
        off = top_p >= 1
        nucleus = _largest(lambda t: mass(t) >= target, peak, off)
        nucleus = jnp.maximum(nucleus, threshold)
        ties = jnp.sum(logits == nucleus[:, None], axis=1, dtype=jnp.int32)
        above = jnp.sum(jnp.where(logits > nucleus[:, None], weights, 0), axis=1)
        one = jnp.exp((nucleus - peak) / temperature)
        needed = jnp.maximum(jnp.ceil((target - above) / one), 1)
        needed = jnp.where(off | ~(needed < ties), ties, needed).astype(jnp.int32)
        last = lax.cond(
            jnp.any(needed < ties),
            lambda: jnp.where(needed < ties, _nth_equal(logits, nucleus, needed), V - 1),
            lambda: jnp.full_like(ties, V - 1),
        )
        return nucleus, last

    threshold, last = lax.cond(jnp.any(top_p < 1), with_top_p, lambda t: (t, last), threshold)
    return TokenFilter(threshold, last)


def _largest(
    holds: Callable[[jax.Array], jax.Array], peak: jax.Array, done: jax.Array
) -> jax.Array:
    """The largest float t [R] for which `holds(t)` [R], a monotone predicate that is true at -inf and false above
    `peak`; -inf where `done`."""
    done |= ~jnp.isfinite(peak)  # a NaN's image would never be reached
    low = jnp.full(peak.shape, _LOWEST, jnp.int32)
    high = jnp.where(done, low, _image(peak)) + 1

    def step(bounds: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low, high = bounds
        middle = (low >> 1) + (high >> 1) + (low & high & 1)
        up = holds(_value(middle))
        return jnp.where(up, middle, low), jnp.where(up, high, middle)

    def unfinished(bounds: tuple[jax.Array, jax.Array]) -> jax.Array:
        # The difference may overflow; equality of the next image does not.
        return jnp.any(bounds[0] + 1 != bounds[1])

    low, _ = lax.while_loop(unfinished, step, (low, high))
    return _value(low)


def _image(x: jax.Array) -> jax.Array:
    """Integers in the order of the floats (-0.0 just below 0.0)."""
    bits = lax.bitcast_convert_type(x, jnp.int32)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


def _value(image: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(image ^ ((image >> 31) & 0x7FFFFFFF), jnp.float32)


def _nth_equal(logits: jax.Array, value: jax.Array, n: jax.Array) -> jax.Array:
    """The index [R] of the n-th (from 1) element of each row that equals the row's `value`."""
    equal = jnp.cumsum(logits == value[:, None], axis=1, dtype=jnp.int32)
    return jnp.sum(equal < n[:, None], axis=1, dtype=jnp.int32)
