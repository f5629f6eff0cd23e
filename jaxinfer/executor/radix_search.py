"""Order statistics of float32 rows without a sort: the digits of the answer, most significant first.

Float32 values are ordered like unsigned integers once the negative ones are complemented. Each pass
compares all values of a row with the seven candidates for the next three bits, so eleven passes find
any threshold exactly. (XLA sorts 64 x 49,152 floats in 1.1 s on two CPU cores, and finds their 1,024
largest in 56 ms; a pass takes about 2 ms.)
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

_DIGIT_BITS = 3
_SLICES = 8
_LOWEST = 0x007FFFFF
"""The image of -inf; smaller ones belong to NaNs."""


def largest_reaching(x: jax.Array, weights: jax.Array | None, target: jax.Array) -> jax.Array:
    """The largest t [R] for which the `weights` [R, N] int32 of the elements of `x` [R, N] float32 at
    or above t sum to at least `target` [R] >= 1; -inf where none does.

    Without weights each counts 1, and t is the `target`-th largest element. A row's sum must stay
    below 2^31.
    """
    digits = jnp.arange(1, 1 << _DIGIT_BITS, dtype=jnp.uint32)

    def digit(i: jax.Array, prefix: jax.Array) -> jax.Array:
        # The last digit is shorter: its upper candidates have failed before and fail again.
        shift = jnp.maximum(32 - _DIGIT_BITS * (i + 1), 0).astype(jnp.uint32)
        candidates = jnp.maximum(prefix[:, None] + (digits << shift), _LOWEST)
        reached = _sums(x, weights, _value(candidates)) >= target[:, None]
        return prefix + (jnp.sum(reached, axis=1, dtype=jnp.uint32) << shift)

    passes = -(-32 // _DIGIT_BITS)
    image = lax.fori_loop(0, passes, digit, jnp.zeros(target.shape, jnp.uint32))
    return _value(jnp.maximum(image, _LOWEST))


def _sums(x: jax.Array, weights: jax.Array | None, thresholds: jax.Array) -> jax.Array:
    """[R, C]: for each of the `thresholds` [R, C] the summed weights at or above it."""
    return lax.platform_dependent(
        x, weights, thresholds, cpu=_sums_in_slices, default=_weight_above
    )


def _weight_above(x: jax.Array, weights: jax.Array | None, thresholds: jax.Array) -> jax.Array:
    return jnp.sum(_weights_above(x, weights, thresholds), axis=2, dtype=jnp.int32)


def _weights_above(x: jax.Array, weights: jax.Array | None, thresholds: jax.Array) -> jax.Array:
    """[R, C, N], the weight of each element for the thresholds that it reaches."""
    above = x[:, None, :] >= thresholds[:, :, None]
    return above.astype(jnp.int32) if weights is None else jnp.where(above, weights[:, None, :], 0)


def _sums_in_slices(x: jax.Array, weights: jax.Array | None, thresholds: jax.Array) -> jax.Array:
    """Slices of the row are added elementwise before they are reduced: XLA on CPU vectorises and
    parallelises that, and not a reduction with the comparison inside (1.5 times the cost of one
    threshold for seven). On a GPU the slices would only be written out.
    """
    N = x.shape[1]
    slices = _SLICES if N % _SLICES == 0 else 1
    width = N // slices
    total = jnp.zeros((*thresholds.shape, width), jnp.int32)
    for start in range(0, N, width):

        def part(array: jax.Array, start: int = start) -> jax.Array:
            return lax.slice_in_dim(array, start, start + width, axis=1)

        total += _weights_above(part(x), None if weights is None else part(weights), thresholds)
    return jnp.sum(total, axis=2)


def _value(image: jax.Array) -> jax.Array:
    bits = jnp.where(image >> 31 != 0, image ^ jnp.uint32(0x80000000), ~image)
    return lax.bitcast_convert_type(bits, jnp.float32)
