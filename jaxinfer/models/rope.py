"""Rotary position embedding (arXiv 2104.09864), halves rotated against each other as in GPT-NeoX."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.models.spec import RopeSpec

Rotation = tuple[jax.Array, jax.Array]
"""Cosine and sine of each token's angles, both [T, D/2] float32 for D rotated dimensions."""


def rotation(spec: RopeSpec, positions: jax.Array) -> Rotation:
    """The rotations at `positions` [T], shared by all layers of the same spec."""
    frequencies = np.asarray(spec.inverse_frequencies, np.float32)
    angles = positions[:, None].astype(jnp.float32) * frequencies
    return jnp.cos(angles) * spec.attention_factor, jnp.sin(angles) * spec.attention_factor


def no_rotation(num_tokens: int, head_dim: int) -> Rotation:
    """That of whole heads by an angle of zero, exactly: kernels take it as they take others."""
    shape = (num_tokens, head_dim // 2)
    return jnp.ones(shape, jnp.float32), jnp.zeros(shape, jnp.float32)
