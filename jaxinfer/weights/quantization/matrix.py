"""A quantized matrix as every scheme hands it on: a code per element, and the numbers that turn codes into weights.

    weight = (decode(code) - zero) * scale + minimum

Each number belongs to a group of neighbouring columns of one row. Of k-quants, scales and minima are small integers, which
floats of larger groups multiply.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

Codes = Literal["uint4", "uint5", "uint6", "uint8", "int8", "e4m3", "e2m1", "nf4"]
Activation = Literal["int8", "e4m3"]

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
"""Magnitudes of a 4-bit float by its low three bits (OCP Microscaling Formats 1.0); the fourth bit is the sign."""

# Quantiles of the normal distribution (QLoRA, arXiv 2305.14314, appendix E).
NF4 = np.array(
    [
        -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
        -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0,
        0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
        0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
    ],
    np.float32,
)  # fmt: skip

_CHUNK_ELEMENTS = 1 << 18


@dataclass(frozen=True, slots=True)
class MatrixFormat:
    """Fields have the meaning and the names of `kernels_pallas.quantized_matmul.format.WeightFormat`'s."""

    codes: Codes
    group_size: int | None
    scales: str
    zero: int = 0
    zeros: bool = False
    minima: str | None = None
    super_group_size: int | None = None
    super_scales: str = "float16"
    activation: Activation | None = None
    static_input: bool = False
    pack_block: int | None = None
    ordered: bool = False
    """Columns stand in another order: column j multiplies input `order[j]`."""

    def weight_fields(self) -> dict[str, Any]:
        """The arguments of `WeightFormat`."""
        return {name: getattr(self, name) for name in self.__slots__ if name != "ordered"}


@dataclass(frozen=True, slots=True)
class QuantizedMatrix:
    """`arrays`, named as `QuantizedWeight`'s: "codes" [*rows, columns], uint8, or int8 and float8_e4m3fn where the codes are
    that; "scales", "zeros", "minima" [*rows, groups], or "scales" [*rows] without groups; "super_scales", "super_minima"
    [*rows, super-groups]. Scales of float8_e8m0fnu are their bits, uint8.

    `order` [columns] int32: of a format that is `ordered`. `input_scale`: float32, of one that has a `static_input`.
    """

    format: MatrixFormat
    arrays: Mapping[str, np.ndarray]
    order: np.ndarray | None = None
    input_scale: np.ndarray | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return self.arrays["codes"].shape

    def dequantize(self, out: np.ndarray) -> np.ndarray:
        """Write the weights into `out`, of this shape: computed in float32 and rounded once. Returns it."""
        columns = self.shape[-1]
        flat = {name: _by_row(value, self) for name, value in self.arrays.items()}
        target = out.reshape(-1, columns)
        step = max(1, _CHUNK_ELEMENTS // max(columns, 1))
        for start in range(0, len(target), step):
            part = slice(start, start + step)
            values = _values(self.format, {name: value[part] for name, value in flat.items()})
            if self.order is None:
                target[part] = values
            else:
                target[part, self.order] = values
        return out


def _by_row(value: np.ndarray, matrix: QuantizedMatrix) -> np.ndarray:
    """[rows, entries]"""
    return value.reshape(int(np.prod(matrix.shape[:-1], dtype=np.int64)), -1)


def _values(form: MatrixFormat, arrays: Mapping[str, np.ndarray]) -> np.ndarray:
    """[rows, columns] float32, in the order of operations of the schemes' own code."""
    codes = arrays["codes"]
    scales = _float32(form.scales, arrays["scales"])
    minima = None if "minima" not in arrays else arrays["minima"].astype(np.float32)
    if form.super_group_size is not None:
        scales = _times(scales, arrays["super_scales"])
        if "super_minima" in arrays:
            assert minima is not None
            minima = _times(minima, arrays["super_minima"])
    values = _decode(form, codes).reshape(len(codes), scales.shape[1], -1)
    if form.zeros:
        values -= arrays["zeros"][..., None]
    values *= scales[..., None]
    if minima is not None:
        values += minima[..., None]
    return values.reshape(codes.shape)


def _decode(form: MatrixFormat, codes: np.ndarray) -> np.ndarray:
    if form.codes == "e2m1":
        return np.concatenate([E2M1, -E2M1])[codes]
    if form.codes == "nf4":
        return NF4[codes]
    return codes.astype(np.float32) - np.float32(form.zero)


def _times(values: np.ndarray, factors: np.ndarray) -> np.ndarray:
    wide = np.repeat(factors.astype(np.float32), values.shape[1] // factors.shape[1], axis=1)
    return wide * values


def _float32(kind: str, scales: np.ndarray) -> np.ndarray:
    if kind != "float8_e8m0fnu":
        return scales.astype(np.float32)
    values = np.ldexp(np.float32(1), scales.astype(np.int32) - 127)
    return np.where(scales == 255, np.float32(np.nan), values)
