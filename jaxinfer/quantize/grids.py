"""Weights on grids of 4 and 8 bits, each rounded to the nearest point."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

_TOP_CODE = 15
_SMALLEST_SCALE = 2.0**-24
"""The smallest float16."""
_FLOAT16 = np.dtype(np.float16)


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class Int4Groups:
    """(codes - zeros) * scales, for weights [O, I] in groups of g along a row."""

    codes: jax.Array
    """[O, I] uint8, 0 to 15."""
    zeros: jax.Array
    """[O, I/g] uint8, 0 to 15."""
    scales: jax.Array
    """[O, I/g]"""

    def values(self) -> jax.Array:
        """[O, I] float32."""
        num_rows, num_groups = self.scales.shape
        codes = self.codes.reshape(num_rows, num_groups, -1).astype(jnp.float32)
        differences = codes - self.zeros[..., None].astype(jnp.float32)
        return (differences * self.scales[..., None].astype(jnp.float32)).reshape(num_rows, -1)


def round_to_int4(
    weight_oi: jax.Array, group_size: int, scale_dtype: np.dtype = _FLOAT16
) -> Int4Groups:
    """The grid of each group reaches from its least weight to its greatest, and holds zero."""
    groups = weight_oi.astype(jnp.float32).reshape(weight_oi.shape[0], -1, group_size)
    return on_grids(groups, *int4_grids(groups, scale_dtype))


def on_grids(groups_ong: jax.Array, zeros: jax.Array, scales: jax.Array) -> Int4Groups:
    """Weights [O, I/g, g] at the nearest points."""
    codes = int4_codes(groups_ong, zeros[..., None], scales[..., None])
    return Int4Groups(codes.reshape(len(codes), -1), zeros, scales)


def int4_grids(
    groups: jax.Array,
    scale_dtype: np.dtype,
    share: jax.Array | float = 1.0,
    shift: jax.Array | float = 0.0,
) -> tuple[jax.Array, jax.Array]:
    """Zeros (uint8) and scales of the grids of groups along the last axis, which reach to `share` of the least weight and
    of the greatest, then moved down by `shift` points."""
    low = jnp.minimum(groups.min(-1), 0.0) * share
    high = jnp.maximum(groups.max(-1), 0.0) * share
    scales = jnp.maximum((high - low) / _TOP_CODE, _SMALLEST_SCALE).astype(scale_dtype)
    # Zeros are those for the scale that is stored.
    zeros = jnp.round(-low / scales.astype(jnp.float32)) + shift
    return jnp.clip(zeros, 0, _TOP_CODE).astype(jnp.uint8), scales


def int4_codes(weights: jax.Array, zeros: jax.Array, scales: jax.Array) -> jax.Array:
    """The nearest points' codes, uint8; all of shapes that broadcast."""
    steps = jnp.round(weights / scales.astype(jnp.float32))
    return jnp.clip(steps + zeros.astype(jnp.float32), 0, _TOP_CODE).astype(jnp.uint8)


def round_to_int8(weight_oi: np.ndarray, scale_dtype: np.dtype) -> tuple[np.ndarray, np.ndarray]:
    """Codes [O, I] int8 and scales [O, 1]: codes * scales, symmetric around zero."""
    scales = _row_scales(weight_oi, 127, scale_dtype)
    codes = np.rint(weight_oi / scales.astype(np.float32))
    return np.clip(codes, -127, 127).astype(np.int8), scales


def round_to_e4m3(weight_oi: np.ndarray, scale_dtype: np.dtype) -> tuple[np.ndarray, np.ndarray]:
    """Codes [O, I] float8_e4m3fn and scales [O, 1]: codes * scales."""
    top = float(ml_dtypes.finfo(ml_dtypes.float8_e4m3fn).max)
    scales = _row_scales(weight_oi, top, scale_dtype)
    codes = np.clip(weight_oi / scales.astype(np.float32), -top, top)
    return codes.astype(ml_dtypes.float8_e4m3fn), scales


def _row_scales(weight_oi: np.ndarray, top: float, dtype: np.dtype) -> np.ndarray:
    largest = np.abs(weight_oi).max(axis=1, keepdims=True).astype(np.float32)
    # A row of zeros needs some scale, one too small for the dtype the smallest that it has.
    scales = np.where(largest == 0, 1, largest / np.float32(top)).astype(dtype)
    return np.maximum(scales, ml_dtypes.finfo(dtype).smallest_subnormal)
