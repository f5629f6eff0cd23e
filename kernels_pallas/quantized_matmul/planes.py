"""A weight dequantized in the order that its bytes have it: the first codes of all bytes, then the second ones, and so on.

A matmul doesn't care about the order of what it contracts, and a CPU that interleaves codes takes four times as long.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from kernels_pallas.quantized_matmul.format import PLANES, WeightFormat
from kernels_pallas.quantized_matmul.weight import QuantizedWeight, code_values, scaled

Planes = tuple[jax.Array, ...]
"""One [rows, K / planes] for each code that a byte holds."""


def num_planes(format: WeightFormat) -> int:
    return 8 // PLANES[format.bits][0]


def planar(x_mk: jax.Array, format: WeightFormat) -> Planes:
    """The columns of x that go with each plane of a weight."""
    planes = num_planes(format)
    if planes == 1:
        return (x_mk,)
    parts = x_mk.reshape(x_mk.shape[0], -1, planes)
    return tuple(parts[:, :, i] for i in range(planes))


def dequantized_planes(weight: QuantizedWeight, dtype: jnp.dtype) -> Planes:
    """A weight [N, K] in `dtype`, from float32 with one rounding."""
    return tuple(
        rounded(scaled(code_values(codes, weight.format, jnp.float32), weight), dtype)
        for codes in code_planes(weight)
    )


def code_planes(weight: QuantizedWeight) -> Planes:
    """Codes as `unpack_codes` has them."""
    low, *high = PLANES[weight.format.bits]
    if low == 8:
        return (weight.codes,)
    planes = 8 // low
    found = []
    for i in range(planes):
        codes = (weight.codes >> (i * low)) & ((1 << low) - 1)
        if high:
            [width] = high
            # A byte of high bits goes with several neighbouring bytes of codes.
            shifts = jnp.arange(i * width, 8, planes * width, dtype=jnp.uint8)
            bits = (weight.high_bits[..., None] >> shifts) & ((1 << width) - 1)
            codes = codes | (bits.reshape(codes.shape) << low)
        found.append(codes)
    return tuple(found)


def rounded(x: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """float32 as `dtype`, to the nearest, ties to even.

    To bfloat16 by hand: XLA's own conversion minds every NaN and takes a CPU ten times as long. A NaN stays NaN here but for
    those that no arithmetic makes.
    """
    if dtype != jnp.bfloat16:
        return x.astype(dtype)
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    bits = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return jax.lax.bitcast_convert_type(bits.astype(jnp.uint16), jnp.bfloat16)
