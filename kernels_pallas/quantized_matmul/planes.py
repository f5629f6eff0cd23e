"""A weight dequantized in the order that its bytes have it: the first codes of all bytes, then the second ones, and so on.

A matmul doesn't care about the order of what it contracts, and a CPU that interleaves codes takes four times as long.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from kernels_pallas.quantized_matmul.format import PLANES, WeightFormat
from kernels_pallas.quantized_matmul.weight import (
    GroupParameters,
    QuantizedWeight,
    code_values,
    group_parameters,
    scaled,
)

Planes = tuple[jax.Array, ...]
"""One [rows, K / planes] for each code that a byte holds."""


def num_planes(format: WeightFormat) -> int:
    return 8 // PLANES[format.bits][0]


def planar(x_mk: jax.Array, format: WeightFormat) -> Planes:
    """The columns of x that go with each plane of a weight."""
    planes = num_planes(format)
    if planes == 1:
        return (x_mk,)
    num_rows, size = x_mk.shape
    parts = x_mk.reshape(num_rows, size // format.block, planes, -1)
    return tuple(parts[:, :, i].reshape(num_rows, -1) for i in range(planes))


def dequantized_planes(weight: QuantizedWeight, dtype: jnp.dtype) -> Planes:
    """A weight [N, K] in `dtype`, from float32 with one rounding."""
    groups = group_parameters(weight)
    return tuple(
        rounded(
            scaled(code_values(codes, weight.format), _of_plane(groups, i, weight.format)), dtype
        )
        for i, codes in enumerate(_code_planes(weight))
    )


def _code_planes(weight: QuantizedWeight) -> Planes:
    """Codes as `unpack_codes` has them."""
    low, *high = PLANES[weight.format.bits]
    if low == 8:
        return (weight.codes,)
    planes, mask = num_planes(weight.format), (1 << low) - 1
    found = [(weight.codes >> (i * low)) & mask for i in range(planes)]
    if high:
        [width] = high
        num_rows, num_bytes = weight.codes.shape
        blocks = num_bytes * planes // weight.format.block
        high_bits = weight.high_bits.reshape(num_rows, blocks, 1, -1)
        # A byte of high bits goes with several bytes of codes in each plane.
        shifts = jnp.arange(0, 8, width, dtype=jnp.uint8).reshape(planes, -1, 1)
        for i in range(planes):
            bits = (high_bits >> shifts[i]) & ((1 << width) - 1)
            found[i] = found[i] | (bits.reshape(num_rows, num_bytes) << low)
    return tuple(found)


def _of_plane(groups: GroupParameters, plane: int, format: WeightFormat) -> GroupParameters:
    """The parameters of the groups that a plane has elements of, in order."""
    if format.group_size is None or format.group_size % format.block == 0:
        return groups
    part = format.block // num_planes(format)
    first, count = plane * part // format.group_size, max(part // format.group_size, 1)

    def own(values: jax.Array | None) -> jax.Array | None:
        if values is None:
            return None
        blocks = values.reshape(values.shape[0], -1, format.block // format.group_size)
        return blocks[:, :, first : first + count].reshape(values.shape[0], -1)

    return GroupParameters(*map(own, groups))


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
