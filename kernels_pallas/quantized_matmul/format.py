"""How a weight is quantized: what its codes stand for, what scales and offsets go with them, and the arrays that hold it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
    -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0,
    0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
"""Quantiles of the normal distribution (arXiv 2305.14314, appendix E)."""

BITS = {
    "uint2": 2, "uint3": 3, "uint4": 4, "uint5": 5, "uint6": 6, "uint8": 8, "int8": 8,
    "e4m3": 8, "e2m1": 4, "nf4": 4,
}  # fmt: skip
"""Of the kinds of codes."""

PLANES = {2: (2,), 3: (2, 1), 4: (4,), 5: (4, 1), 6: (4, 2), 8: (8,)}
"""Bits of a code that `QuantizedWeight.codes` holds, the lowest, and those that `high_bits` holds."""

_FLOATS = ("float16", "bfloat16", "float32")
_SCALES = (*_FLOATS, "float8_e8m0fnu", "uint8", "int8")
_ACTIVATIONS = {"int8": "int8", "e4m3": "e4m3"}
"""The codes that go with activations of each kind."""


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """value = (code - zero) * scale + minimum, for groups of neighbouring elements of the last axis.

    Raises:
        ValueError: a field is not one of those below; the message says which are.
    """

    codes: str
    """Of the codes: integers ("uint2" … "uint8", "int8"), floats of 8 and 4 bits ("e4m3", "e2m1"), or "nf4"."""
    group_size: int | None
    """Elements with one scale; None: a scale for each index of the leading axes, which are not contracted."""
    dtype: str = "bfloat16"
    """That the logical weight is said to have."""
    scales: str = "float16"
    """float16, bfloat16, float32, float8_e8m0fnu (held as uint8); uint8 and int8 are multiplied by a super-scale."""
    zero: int = 0
    """Subtracted from integer codes: 8 makes "uint4" symmetric."""
    zeros: bool = False
    """Whether an array holds a zero of each group, uint8, which is subtracted from integer codes instead."""
    minima: str | None = None
    """float16, bfloat16, float32, or uint8 (multiplied by a super-minimum)."""
    super_group_size: int | None = None
    """Elements with one super-scale (and super-minimum), a multiple of the group size."""
    super_scales: str = "float16"
    """float16, bfloat16 or float32, of the super-minima also."""
    activation: str | None = None
    """"int8" or "e4m3": the activations are quantized too, each row and group of the weight's group size by itself."""
    static_input: bool = False
    """Whether the activations' scale is given, one for all, instead of taken from each row."""
    pack_block: int | None = None
    """Neighbouring elements that share bytes, each byte holding some from all over the block. A power of two; None: as few
    as there can be. 64 is quickest, and what the kernel for Hopper takes; cuts of the last axis must be at multiples."""

    def __post_init__(self) -> None:
        _accepted("codes", self.codes, tuple(BITS))
        _accepted("dtype", self.dtype, _FLOATS)
        _accepted("scales", self.scales, _SCALES)
        _accepted("minima", self.minima, (None, *_FLOATS, "uint8"))
        _accepted("super_scales", self.super_scales, _FLOATS)
        _accepted("activation", self.activation, (None, *_ACTIVATIONS))
        for name in ("group_size", "super_group_size"):
            size = getattr(self, name)
            if size is not None and size < 1:
                raise ValueError(f"WeightFormat.{name} must be positive or None, got {size}")
        least = 8 // PLANES[self.bits][-1]
        if self.pack_block is not None and (
            self.pack_block < least or self.pack_block & (self.pack_block - 1)
        ):
            raise ValueError(
                f"WeightFormat.pack_block must be a power of two of at least {least} for {self.codes!r} "
                f"or None, got {self.pack_block}"
            )
        if self.group_size is not None and self.group_size % self.block:
            # A group smaller than a block: whole in each of its bytes' places, or over several of them.
            part = self.block * PLANES[self.bits][0] // 8
            if self.block % self.group_size or (self.group_size % part and part % self.group_size):
                raise ValueError(
                    f"WeightFormat.group_size must be a multiple of pack_block or divide it, "
                    f"{self.block} for {self.codes!r}, got {self.group_size}"
                )
        integers = self.codes.startswith(("uint", "int"))
        if (self.zero or self.zeros) and not integers:
            raise ValueError(
                f"WeightFormat.zero and .zeros go with integer codes, not with {self.codes!r}"
            )
        if self.zero and self.zeros:
            raise ValueError(f"WeightFormat.zero must be 0 with zeros=True, got {self.zero}")
        two_levels = self.scales in ("uint8", "int8")
        if two_levels != (self.super_group_size is not None):
            raise ValueError(
                f"WeightFormat.super_group_size must be given with scales of uint8 or int8 and only "
                f"then, got {self.super_group_size} with scales {self.scales!r}"
            )
        if self.minima == "uint8" and not two_levels:
            raise ValueError("WeightFormat.minima of uint8 go with scales of uint8 or int8")
        if two_levels and (self.group_size is None or self.super_group_size % self.group_size):
            raise ValueError(
                f"WeightFormat.super_group_size must be a multiple of group_size {self.group_size}, "
                f"got {self.super_group_size}"
            )
        if self.group_size is None and (self.zeros or self.minima):
            raise ValueError("WeightFormat.zeros and .minima need a group_size, got None")
        if self.activation is not None:
            if (
                self.codes != _ACTIVATIONS[self.activation]
                or self.minima
                or self.zeros
                or self.zero
            ):
                raise ValueError(
                    f"WeightFormat.activation {self.activation!r} goes with codes "
                    f"{_ACTIVATIONS[self.activation]!r} without zeros and minima, got {self}"
                )
        elif self.static_input:
            raise ValueError("WeightFormat.static_input needs an activation, got None")

    @property
    def bits(self) -> int:
        """Of a code."""
        return BITS[self.codes]

    @property
    def block(self) -> int:
        """Elements of the last axis that share bytes."""
        return 1 if self.bits == 8 else self.pack_block or 8 // PLANES[self.bits][-1]

    def arrays(self, shape: tuple[int, ...], num_in_axes: int = 1) -> dict[str, Any]:
        """The arrays of a weight of a logical shape, as `jax.ShapeDtypeStruct` by field of `QuantizedWeight`.

        Args:
            num_in_axes: how many trailing axes are contracted; matters for `group_size=None` only.

        Raises:
            ValueError: the last axis is not whole groups, super-groups and bytes.
        """
        *rows, size = shape
        steps = {"pack_block": self.block, "group_size": self.group_size}
        steps["super_group_size"] = self.super_group_size
        for name, step in steps.items():
            if step is not None and size % step:
                raise ValueError(
                    f"a weight of shape {shape} has a last axis of {size}, which WeightFormat.{name} "
                    f"{step} does not divide"
                )
        planes = PLANES[self.bits]
        code_dtype = jnp.int8 if self.codes == "int8" else jnp.uint8
        found = {"codes": _array(code_dtype, *rows, size * planes[0] // 8)}
        if len(planes) > 1:
            found["high_bits"] = _array(jnp.uint8, *rows, size * planes[1] // 8)
        if self.group_size is None:
            found["scales"] = _array(held_dtype(self.scales), *shape[: len(shape) - num_in_axes])
        else:
            groups = (*rows, size // self.group_size)
            found["scales"] = _array(held_dtype(self.scales), *groups)
            if self.zeros:
                found["zeros"] = _array(jnp.uint8, *groups)
            if self.minima:
                found["minima"] = _array(jnp.dtype(self.minima), *groups)
        if self.super_group_size is not None:
            groups = (*rows, size // self.super_group_size)
            found["super_scales"] = _array(jnp.dtype(self.super_scales), *groups)
            if self.minima == "uint8":
                found["super_minima"] = _array(jnp.dtype(self.super_scales), *groups)
        if self.static_input:
            found["input_scale"] = _array(jnp.float32)
        return found

    def nbytes(self, shape: tuple[int, ...], num_in_axes: int = 1) -> int:
        """Of the arrays of a weight of a logical shape."""
        arrays = self.arrays(shape, num_in_axes).values()
        return sum(array.size * array.dtype.itemsize for array in arrays)


def held_dtype(scales: str) -> np.dtype:
    """That an array of scales has: a CPU handles the bits of powers of two better than their type."""
    return jnp.dtype(jnp.uint8 if scales == "float8_e8m0fnu" else scales)


def _array(dtype: Any, *shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))


def _accepted(name: str, value: Any, accepted: tuple[Any, ...]) -> None:
    if value not in accepted:
        raise ValueError(f"WeightFormat.{name} must be one of {accepted}, got {value!r}")
