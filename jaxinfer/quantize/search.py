"""AWQ's searches (arXiv 2306.00978): how much larger to make the weights of the inputs that count, and where the
grids end, so that what the rounded weights make of the calibration text differs least.

All errors are sums over the text of squared differences between outputs. Those of weights W and Ŵ for inputs x with
second moments C = Σ x xᵀ are the trace of (W - Ŵ) C (W - Ŵ)ᵀ, so that C is all that has to be kept of a text.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.quantize.grids import int4_grids, on_grids, round_to_int4

_NUM_EXPONENTS = 10
_NUM_SHARES, _SHARE_STEP, _GREATEST_SHARE = 22, 0.02, 1.04
_GRIDS = tuple(
    (_GREATEST_SHARE - _SHARE_STEP * i, shift) for i in range(_NUM_SHARES) for shift in (-1, 0, 1)
)
"""Shares of a group's least weight and its greatest where its grid may end, and by how many points it is moved."""
_EPSILON = 1e-8
_MAX_ROWS = 512


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class InputMoments:
    """What a calibration text was to a matrix with I inputs: sums over T tokens."""

    products: jax.Array
    """[I, I] float32: of x xᵀ."""
    magnitudes: jax.Array
    """[I] float32: of |x|."""
    num_tokens: jax.Array
    """T, a number"""

    def __add__(self, other: InputMoments) -> InputMoments:
        return jax.tree.map(jnp.add, self, other)

    def divided_by(self, scale_i: jax.Array) -> InputMoments:
        """Those of x / scale."""
        products = self.products / scale_i[:, None] / scale_i
        return InputMoments(products, self.magnitudes / scale_i, self.num_tokens)


@dataclass(frozen=True, slots=True)
class FoundScale:
    scale: np.ndarray
    """[S] float32, by which each scaled channel's weights are multiplied."""
    error: float
    """With it, and without, of the rows that were looked at."""
    plain_error: float


def find_scale(
    weight_oi: jax.Array, moments: InputMoments, channel_i: np.ndarray, group_size: int
) -> FoundScale:
    """The best of scales x̄^α and x̄^α / w̄^(1-α), x̄ the mean magnitudes of the channels' inputs, w̄ those of their
    weights relative to the largest of the group.

    Args:
        channel_i: the channel of each input, 0 to S - 1: those of one channel share their scale.
    """
    num_channels = int(channel_i.max()) + 1
    candidates = _candidates(
        weight_oi, moments.magnitudes, jnp.asarray(channel_i), num_channels, group_size
    )
    # The first candidate is a scale of one everywhere. Some hundreds of rows tell which is best.
    some = weight_oi[:: -(-weight_oi.shape[0] // _MAX_ROWS)]
    errors = _errors(some, moments.products, candidates[:, channel_i], group_size)
    best = int(jnp.argmin(errors))
    return FoundScale(np.asarray(candidates[best]), float(errors[best]), float(errors[0]))


@partial(jax.jit, static_argnames=("num_channels", "group_size"))
def _candidates(
    weight_oi: jax.Array,
    magnitude_i: jax.Array,
    channel_i: jax.Array,
    num_channels: int,
    group_size: int,
) -> jax.Array:
    """[N, S]"""
    groups = jnp.abs(weight_oi).reshape(weight_oi.shape[0], -1, group_size)
    relative = groups / (groups.max(-1, keepdims=True) + _EPSILON)
    weight_i = relative.reshape(weight_oi.shape).mean(0)

    def by_channel(x_i: jax.Array) -> jax.Array:
        # Channels have equally many inputs, so sums do for means once they are normalised.
        sums = jnp.zeros(num_channels, jnp.float32).at[channel_i].add(x_i)
        return sums / sums.max() + _EPSILON

    x_s, w_s = by_channel(magnitude_i), by_channel(weight_i)
    exponents = jnp.arange(_NUM_EXPONENTS) / _NUM_EXPONENTS

    def candidate(exponent: jax.Array, weights_count: jax.Array) -> jax.Array:
        scale = jnp.maximum(x_s**exponent / w_s ** (weights_count * (1 - exponent)), 1e-4)
        return scale / jnp.sqrt(scale.max() * scale.min())

    plain = jax.vmap(candidate, (0, None))(exponents, 0.0)
    return jnp.concatenate([plain, jax.vmap(candidate, (0, None))(exponents, 1.0)])


@partial(jax.jit, static_argnames="group_size")
def _errors(
    weight_oi: jax.Array, products_ii: jax.Array, scales_ni: jax.Array, group_size: int
) -> jax.Array:
    """[N], by scale."""

    def error(scale_i: jax.Array) -> jax.Array:
        rounded = round_to_int4(weight_oi * scale_i, group_size).values() / scale_i
        return _output_error(rounded - weight_oi, products_ii)

    return jax.lax.map(error, scales_ni)


def _output_error(difference_oi: jax.Array, products_ii: jax.Array) -> jax.Array:
    product = jnp.matmul(difference_oi, products_ii, precision=jax.lax.Precision.HIGHEST)
    return jnp.sum(product * difference_oi)


@partial(jax.jit, static_argnames="scale_dtype")
def best_grids(
    groups_ong: jax.Array, products_ii: jax.Array, scale_dtype: np.dtype
) -> tuple[jax.Array, jax.Array]:
    """Zeros (uint8) and scales [O, N] of the grids of weights [O, N, g] that are found to be the best: what rounding to the
    nearest makes of each group alone is to differ least.

    A grid that leaves out the largest weights is finer for all others, and one that is moved a little takes away what errors
    have in common where a group's weights lie on a grid already.
    """
    _, num_groups, group_size = groups_ong.shape
    blocks = products_ii.reshape(num_groups, group_size, num_groups, group_size)
    products_ngg = jnp.einsum("nanb->nab", blocks)

    def error(zeros: jax.Array, scales: jax.Array) -> jax.Array:
        values = on_grids(groups_ong, zeros, scales).values()
        difference = values.reshape(groups_ong.shape) - groups_ong
        product = jnp.einsum(
            "ona,nab->onb", difference, products_ngg, precision=jax.lax.Precision.HIGHEST
        )
        return jnp.sum(product * difference, -1)

    def better(best: tuple[jax.Array, ...], grid: jax.Array) -> tuple[tuple, None]:
        zeros, scales = int4_grids(groups_ong, scale_dtype, *grid)
        found = error(zeros, scales), zeros, scales
        is_better = found[0] < best[0]
        return tuple(map(partial(jnp.where, is_better), found, best)), None

    plain = int4_grids(groups_ong, scale_dtype)
    grids = jnp.asarray(_GRIDS, jnp.float32)
    (_, zeros, scales), _ = jax.lax.scan(better, (error(*plain), *plain), grids)
    return zeros, scales
