"""A quantized weight as JAX sees it: arrays of codes and scales that know the shape they stand for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from kernels_pallas.quantized_matmul.format import NF4, PLANES, WeightFormat

_ARRAYS = (
    "codes", "scales", "high_bits", "zeros", "minima", "super_scales", "super_minima", "input_scale",
)  # fmt: skip


@partial(jax.tree_util.register_dataclass, meta_fields=["format"], data_fields=_ARRAYS)
@dataclass(frozen=True, eq=False)
class QuantizedWeight:
    """A weight [*out, *in] with groups along the last axis, I; G groups and S super-groups in it.

    Shapes are read off the arrays, so that parts along any axis, where they hold whole groups and bytes, are weights too.
    """

    format: WeightFormat
    codes: jax.Array
    """[*rows, I * bits / 8] uint8 or int8; from `pack`, which alone knows the order within a byte. FP8 as its bits."""
    scales: jax.Array
    """[*rows, G], or [*out] where the format has no groups."""
    high_bits: jax.Array | None = None
    """[*rows, I * bits / 8] uint8: the bits beyond four of five and six, beyond two of three."""
    zeros: jax.Array | None = None
    """[*rows, G] uint8."""
    minima: jax.Array | None = None
    """[*rows, G], added after scaling."""
    super_scales: jax.Array | None = None
    """[*rows, S]."""
    super_minima: jax.Array | None = None
    """[*rows, S], with the sign that what they multiply is added with."""
    input_scale: jax.Array | None = None
    """[] float32."""

    @property
    def shape(self) -> tuple[int, ...]:
        *rows, num_bytes = self.codes.shape
        return (*rows, num_bytes * 8 // PLANES[self.format.bits][0])

    @property
    def ndim(self) -> int:
        return self.codes.ndim

    @property
    def dtype(self) -> np.dtype:
        return jnp.dtype(self.format.dtype)

    @property
    def nbytes(self) -> int:
        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(self))

    def map_arrays(self, change: Callable[[jax.Array], jax.Array]) -> QuantizedWeight:
        """The weight whose arrays are those of this, each changed; but for what the whole weight has once."""
        found = {name: getattr(self, name) for name in _ARRAYS if name != "input_scale"}
        return replace(self, **{k: change(v) for k, v in found.items() if v is not None})


def pack(format: WeightFormat, arrays: Mapping[str, Any]) -> dict[str, Any]:
    """The arrays of a `QuantizedWeight` from those of a weight with a code per element.

    Args:
        arrays: numpy or JAX: "codes" [*rows, I], unsigned integers below 2 ** bits (int8: int8; e4m3: float8_e4m3fn or
            its bits), and the other arrays as `QuantizedWeight` has them (powers of two: float8_e8m0fnu or its bits).
    """
    codes = _bits_of(arrays["codes"])
    found = {name: _bits_of(array) for name, array in arrays.items()}
    low, *high = PLANES[format.bits]
    if low == 8:
        return found
    found["codes"] = _pack_plane(codes & ((1 << low) - 1), low, format.block)
    if high:
        found["high_bits"] = _pack_plane(codes >> low, high[0], format.block)
    return found


def unpack_codes(weight: QuantizedWeight) -> Any:
    """[*rows, I]: uint8 below 2 ** bits, int8, or the bits of e4m3; numpy for numpy."""
    low, *high = PLANES[weight.format.bits]
    codes = _unpack_plane(weight.codes, low, weight.format.block)
    if high:
        codes = codes | (_unpack_plane(weight.high_bits, high[0], weight.format.block) << low)
    return codes


def dequantize(weight: QuantizedWeight, dtype: Any = None) -> jax.Array:
    """The logical weight [*out, *in] in `dtype` (None: its own), from float32 with one rounding."""
    values = code_values(unpack_codes(weight), weight.format)
    return scaled(values, group_parameters(weight)).astype(dtype or weight.dtype)


class GroupParameters(NamedTuple):
    """float32, [*rows, G] each, or [*out] where there are no groups."""

    scales: jax.Array
    zeros: jax.Array | None
    minima: jax.Array | None


def group_parameters(weight: QuantizedWeight) -> GroupParameters:
    """With what super-groups multiply them by."""
    scales = _as_float32(weight.scales, weight.format.scales)
    zeros = None if weight.zeros is None else weight.zeros.astype(jnp.float32)
    minima = None if weight.minima is None else weight.minima.astype(jnp.float32)
    if weight.super_scales is not None:
        scales = _times_super(scales, weight.super_scales)
    if weight.super_minima is not None:
        minima = _times_super(minima, weight.super_minima)
    return GroupParameters(scales, zeros, minima)


def scaled(values: jax.Array, groups: GroupParameters) -> jax.Array:
    """The logical weight in float32 from what its codes stand for, [*rows, I]."""
    if groups.scales.ndim < values.ndim:
        scales = groups.scales
        return values * scales.reshape(*scales.shape, *[1] * (values.ndim - scales.ndim))
    grouped = values.reshape(*groups.scales.shape, -1)
    if groups.zeros is not None:
        grouped = grouped - groups.zeros[..., None]
    grouped = grouped * groups.scales[..., None]
    if groups.minima is not None:
        grouped = grouped + groups.minima[..., None]
    return grouped.reshape(values.shape)


def code_values(codes: jax.Array, format: WeightFormat) -> jax.Array:
    """What codes from `unpack_codes` stand for in float32, less the format's zero, before scaling.

    Small floats by way of float16's bits: a CPU takes twenty times as long for XLA's own conversion of FP8.
    """
    if format.codes == "e4m3":
        values = _small_float(codes, exponent_and_mantissa=7, mantissa=3) * 2.0**8
        return jnp.where((codes & 0x7F) == 0x7F, jnp.nan, values)
    if format.codes == "e2m1":
        return _small_float(codes, exponent_and_mantissa=3, mantissa=1) * 2.0**14
    if format.codes == "nf4":
        return jnp.asarray(NF4, jnp.float32)[codes.astype(jnp.int32)]
    values = codes.astype(jnp.float32)
    return values - format.zero if format.zero else values


def as_matrix(weight: QuantizedWeight, num_in_axes: int = 1) -> QuantizedWeight:
    """The weight with its leading axes merged and the last `num_in_axes`: [N, K]."""
    num_out_axes = weight.ndim - num_in_axes
    return weight.map_arrays(
        lambda x: (
            x.reshape(int(np.prod(x.shape[:num_out_axes])), -1)
            if x.ndim == weight.ndim
            else x.reshape(-1)
        )
    )


def take_rows(weight: QuantizedWeight, ids: jax.Array) -> QuantizedWeight:
    """The weight of the rows `ids` [*batch] of the first axis: [*batch, …]."""
    return weight.map_arrays(lambda x: jnp.take(x, ids, axis=0))


def check_weight(weight: QuantizedWeight, num_in_axes: int = 1) -> None:
    """Raises `ValueError` unless the weight has the arrays of its format, in their shapes and dtypes."""
    expected = weight.format.arrays(weight.shape, num_in_axes)
    for name in _ARRAYS:
        array, want = getattr(weight, name), expected.get(name)
        if array is None and want is None:
            continue
        if want is None:
            raise ValueError(f"weight.{name} must be None for {weight.format}, got {array.shape}")
        if array is None or (array.shape, array.dtype) != (want.shape, want.dtype):
            found = None if array is None else f"{array.dtype} {array.shape}"
            raise ValueError(
                f"weight.{name} must be {want.dtype} {want.shape} for a weight of shape "
                f"{weight.shape} and {weight.format}, got {found}"
            )


def _times_super(values: jax.Array, factors: jax.Array) -> jax.Array:
    *rows, num_super = factors.shape
    parts = values.reshape(*rows, num_super, -1) * factors.astype(jnp.float32)[..., None]
    return parts.reshape(values.shape)


def _as_float32(scales: jax.Array, kind: str) -> jax.Array:
    if kind != "float8_e8m0fnu":
        return scales.astype(jnp.float32)
    # The exponent's bits; the least, 2 ** -127, is below float32's normal numbers, and all ones are NaN.
    bits = scales.astype(jnp.uint32)
    bits = jnp.where(bits == 0, 1 << 22, jnp.where(bits == 255, 0x7FC00000, bits << 23))
    return jax.lax.bitcast_convert_type(bits, jnp.float32)


def _small_float(codes: jax.Array, exponent_and_mantissa: int, mantissa: int) -> jax.Array:
    """A sign, some bits of exponent and of mantissa as the float16 that has them in its lowest bits of exponent."""
    bits = codes.astype(jnp.uint16)
    magnitude = (bits & ((1 << exponent_and_mantissa) - 1)) << (10 - mantissa)
    sign = (bits >> exponent_and_mantissa) << 15
    return jax.lax.bitcast_convert_type(sign | magnitude, jnp.float16).astype(jnp.float32)


def _bits_of(array: Any) -> Any:
    if array.dtype in (jnp.float8_e4m3fn, jnp.float8_e8m0fnu):
        return array.view(jnp.uint8)
    return array


def _pack_plane(values: Any, width: int, block: int) -> Any:
    """Byte j of a block holds the elements j, j + block * width / 8 and so on, from its low bits up."""
    per_byte = 8 // width
    *rows, size = values.shape
    parts = values.astype(np.uint8).reshape(*rows, size // block, per_byte, block // per_byte)
    packed = parts[..., 0, :]
    for i in range(1, per_byte):
        packed = packed | (parts[..., i, :] << (width * i))
    return packed.reshape(*rows, size // per_byte)


def _unpack_plane(packed: Any, width: int, block: int) -> Any:
    if width == 8:
        return packed
    xp = np if isinstance(packed, np.ndarray) else jnp
    *rows, num_bytes = packed.shape
    blocks = packed.reshape(*rows, num_bytes * 8 // width // block, block * width // 8)
    parts = [(blocks >> shift) & ((1 << width) - 1) for shift in range(0, 8, width)]
    return xp.stack(parts, axis=-2).reshape(*rows, -1)
