"""Random weights for a model whose checkpoint isn't there: for timing, and for trying out a configuration."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import numpy as np

from jaxinfer.weights.plan import LeafPath

if TYPE_CHECKING:
    import jax

DEVIATION = 0.02


def dummy_leaves(
    abstract: dict[LeafPath, jax.ShapeDtypeStruct], seed: int = 0
) -> dict[LeafPath, jax.Array]:
    """Random weights of the model's shapes, one-dimensional norms 1.

    Each device makes its own part where it stays, so that nothing passes through the host. The numbers lie between
    -0.05 and 0.05, with a deviation of 0.02; they depend on the seed, not on the sharding.
    """
    rng = np.random.default_rng(seed)
    leaves = {}
    for path, leaf in abstract.items():
        salt = rng.integers(1 << 32, dtype=np.uint32)
        constant = "norm" in path[-1] and not path[-1].endswith("bias")
        leaves[path] = _maker(leaf.shape, leaf.dtype, leaf.sharding, constant)(salt)
    return leaves


@functools.cache
def _maker(
    shape: tuple[int, ...], dtype: np.dtype, sharding: jax.sharding.Sharding | None, constant: bool
):
    """The program for all leaves of one kind."""
    import jax
    import jax.numpy as jnp

    def make(salt: jax.Array) -> jax.Array:
        if constant:
            return jnp.ones(shape, dtype)
        index = jnp.zeros(shape, jnp.uint32)
        for axis, size in enumerate(shape):
            index = index * np.uint32(size) + jax.lax.broadcasted_iota(jnp.uint32, shape, axis)
        bits = _mixed(_mixed(index ^ salt) + salt)
        # The sum of two uniform numbers in [-1/2, 1/2] has a variance of 1/6.
        halves = (bits & 0xFFFF).astype(jnp.float32) + (bits >> 16).astype(jnp.float32)
        return ((halves / 0xFFFF - 1) * np.float32(DEVIATION * 6**0.5)).astype(dtype)

    return jax.jit(make, out_shardings=sharding)


def _mixed(bits: jax.Array) -> jax.Array:
    """MurmurHash3's finalizer: every bit of the result depends on every one of `bits`."""
    bits = (bits ^ (bits >> 16)) * np.uint32(0x85EBCA6B)
    bits = (bits ^ (bits >> 13)) * np.uint32(0xC2B2AE35)
    return bits ^ (bits >> 16)
