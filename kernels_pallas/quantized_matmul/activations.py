"""Activations quantized as a checkpoint's scheme has it: rows, or groups of them, with a scale each."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from kernels_pallas.quantized_matmul.weight import QuantizedWeight

_LARGEST = {"int8": 127.0, "e4m3": 448.0}
_LEAST_PEAK = 1e-10
"""Of a group, so that zeros have a scale too."""


def quantize_activations(x_mk: jax.Array, weight: QuantizedWeight) -> tuple[jax.Array, jax.Array]:
    """Codes [M, K], int8 or float8_e4m3fn, and their scales [M, G] float32, G being 1 where the weight has no groups.

    To the nearest code, ties to even; beyond the largest to the largest. Without a given scale the largest magnitude of
    each row and group gets the largest code.
    """
    largest = _LARGEST[weight.format.activation]
    num_rows, size = x_mk.shape
    groups = x_mk.astype(jnp.float32).reshape(num_rows, -1, weight.format.group_size or size)
    if weight.input_scale is not None:
        scales = jnp.broadcast_to(weight.input_scale, groups.shape[:2])
    else:
        peaks = jnp.maximum(jnp.max(jnp.abs(groups), axis=-1), _LEAST_PEAK)
        scales = peaks * jnp.float32(1 / largest)
    codes = jnp.clip(groups / scales[..., None], -largest, largest)
    return _rounded(codes, weight.format.activation).reshape(num_rows, size), scales


def _rounded(values: jax.Array, kind: Any) -> jax.Array:
    if kind == "int8":
        return jnp.round(values).astype(jnp.int8)
    return values.astype(jnp.float8_e4m3fn)
