"""Random quantized weights of every kind, and what they stand for, in float64 numpy and one element at a time."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np

from kernels_pallas import QuantizedWeight, WeightFormat
from kernels_pallas.quantized_matmul.weight import pack

FORMATS = {
    "awq, groups of 128": WeightFormat("uint4", 128, zeros=True),
    "awq, groups of 32, bfloat16": WeightFormat("uint4", 32, zeros=True, scales="bfloat16"),
    "gptq, 4 bits, symmetric": WeightFormat("uint4", 64, zero=8),
    "gptq, 8 bits": WeightFormat("uint8", 128, zeros=True),
    "int8 of each output": WeightFormat("int8", None, scales="float32"),
    "e4m3 of each output": WeightFormat("e4m3", None, scales="float32"),
    "e4m3 in blocks": WeightFormat("e4m3", 128, scales="float32"),
    "int8, activations too": WeightFormat("int8", None, scales="float32", activation="int8"),
    "int8, given scale": WeightFormat(
        "int8", None, scales="bfloat16", activation="int8", static_input=True
    ),
    "int8 groups, activations too": WeightFormat("int8", 64, activation="int8"),
    "e4m3, activations too": WeightFormat("e4m3", None, scales="float32", activation="e4m3"),
    "e4m3 in blocks, activations too": WeightFormat(
        "e4m3", 128, scales="float32", activation="e4m3"
    ),
    "mxfp4": WeightFormat("e2m1", 32, scales="float8_e8m0fnu"),
    "nf4": WeightFormat("nf4", 64, scales="float32"),
    "q4_0": WeightFormat("uint4", 32, zero=8),
    "q4_1": WeightFormat("uint4", 32, minima="float16"),
    "q5_1": WeightFormat("uint5", 32, minima="float16"),
    "q8_0": WeightFormat("int8", 32),
    "q2_k": WeightFormat("uint2", 16, scales="uint8", minima="uint8", super_group_size=256),
    "q3_k": WeightFormat("uint3", 16, scales="int8", zero=4, super_group_size=256),
    "blocks of 64, 2 bits": WeightFormat("uint2", 32, zeros=True, pack_block=64),
    "blocks of 64, 3 bits": WeightFormat("uint3", 16, zeros=True, pack_block=64),
    "blocks of 64, 4 bits": WeightFormat("uint4", 32, zeros=True, pack_block=64),
    "blocks of 64, 5 bits": WeightFormat("uint5", 128, zeros=True, pack_block=64),
    "blocks of 64, 6 bits": WeightFormat("uint6", 16, minima="float16", pack_block=64),
    "q4_k": WeightFormat("uint4", 32, scales="uint8", minima="uint8", super_group_size=256),
    "q6_k": WeightFormat("uint6", 16, scales="int8", zero=32, super_group_size=64),
}

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
NF4 = (
    -1.0, -0.6961928, -0.5250731, -0.3949175, -0.2844414, -0.1847734, -0.0910500, 0.0,
    0.0795803, 0.1609302, 0.2461123, 0.3379152, 0.4407098, 0.5626170, 0.7229568, 1.0,
)  # fmt: skip


def random_arrays(
    format: WeightFormat, shape: tuple[int, ...], num_in_axes: int = 1, seed: int = 0
) -> dict[str, np.ndarray]:
    """What `pack` takes: a code per element, and scales that make the weight's elements about one."""
    rng = np.random.default_rng(seed)
    found: dict[str, np.ndarray] = {}
    largest = {"int8": 100.0, "uint8": 100.0, "e4m3": 200.0, "e2m1": 4.0, "nf4": 1.0}
    unit = 1 / largest.get(format.codes, 2 ** (format.bits - 1))
    for name, want in format.arrays(shape, num_in_axes).items():
        dtype = np.dtype(want.dtype)
        if name == "codes":
            if format.codes == "int8":
                found[name] = rng.integers(-128, 128, shape).astype(np.int8)
            elif format.codes == "e4m3":
                found[name] = (
                    rng.normal(size=shape, scale=100)
                    .clip(-448, 448)
                    .astype(ml_dtypes.float8_e4m3fn)
                )
            else:
                found[name] = rng.integers(0, 2**format.bits, shape).astype(np.uint8)
        elif name == "zeros":
            found[name] = rng.integers(0, 2**format.bits, want.shape).astype(np.uint8)
        elif name in ("scales", "minima") and dtype.kind in "iu" and format.super_group_size:
            low = -60 if dtype.kind == "i" else 0
            found[name] = rng.integers(low, 64, want.shape).astype(dtype)
        elif name == "scales" and dtype == np.uint8:
            found[name] = rng.integers(120, 130, want.shape).astype(np.uint8)
        elif name == "scales":
            found[name] = (unit * rng.uniform(0.2, 1, want.shape)).astype(dtype)
        elif name == "super_scales":
            found[name] = (unit / 32 * rng.uniform(0.2, 1, want.shape)).astype(dtype)
        elif name == "super_minima":
            found[name] = (-0.02 * rng.uniform(0.2, 1, want.shape)).astype(dtype)
        elif name == "minima":
            found[name] = -rng.uniform(0, 1, want.shape).astype(dtype)
        elif name == "input_scale":
            found[name] = np.asarray(0.02, np.float32)
    return found


def weight_of(format: WeightFormat, arrays: dict[str, np.ndarray]) -> QuantizedWeight:
    packed = pack(format, arrays)
    return QuantizedWeight(format, **{name: jnp.asarray(array) for name, array in packed.items()})


def stands_for(format: WeightFormat, arrays: dict[str, np.ndarray]) -> np.ndarray:
    """The weight in float64, from the arrays before packing."""
    codes = arrays["codes"]
    if format.codes == "e2m1":
        values = np.where(codes < 8, 1.0, -1.0) * np.array(E2M1)[codes % 8]
    elif format.codes == "nf4":
        values = np.array(NF4)[codes]
    else:
        values = codes.astype(np.float64)
    size = codes.shape[-1]

    def spread(name: str) -> np.ndarray:
        array = arrays[name]
        if format.scales == "float8_e8m0fnu" and name == "scales":
            return np.repeat(2.0 ** (array.astype(np.float64) - 127), format.group_size, axis=-1)
        array = array.astype(np.float64)
        if array.ndim < codes.ndim or (format.group_size is None and name == "scales"):
            return array.reshape(*array.shape, *[1] * (codes.ndim - array.ndim))
        return np.repeat(array, size // array.shape[-1], axis=-1)

    values = values - (spread("zeros") if format.zeros else format.zero)
    scale = spread("scales") * (spread("super_scales") if format.super_group_size else 1.0)
    values = values * scale
    if format.minima:
        factor = spread("super_minima") if format.minima == "uint8" else 1.0
        values = values + spread("minima") * factor
    return values


def quantized_rows(
    x: Any, format: WeightFormat, input_scale: float | None
) -> tuple[np.ndarray, np.ndarray]:
    """x as the scheme quantizes it: what it stands for, and how much that may be off by a code, [M, K] each.

    Whether a number is a hair below or above the middle of two codes isn't for the scheme to say.
    """
    x = np.asarray(x).astype(np.float64)
    groups = x.reshape(x.shape[0], -1, format.group_size or x.shape[1])
    largest = {"int8": 127.0, "e4m3": 448.0}[format.activation]
    scale = input_scale or np.abs(groups).max(axis=-1, keepdims=True) / largest
    ratio = np.clip(groups / scale, -largest, largest)
    if format.activation == "int8":
        codes, step = np.round(ratio), np.ones_like(ratio)
        close = np.abs(np.abs(ratio - np.trunc(ratio)) - 0.5) < 1e-4
    else:
        codes = ratio.astype(ml_dtypes.float8_e4m3fn).astype(np.float64)
        step = np.maximum(2.0 ** (np.floor(np.log2(np.maximum(np.abs(ratio), 2**-6))) - 3), 2**-9)
        close = np.abs(np.abs(ratio - codes) - step / 2) < 1e-4 * np.abs(ratio)
    off = np.where(close, step * scale, 0.0)
    return (codes * scale).reshape(x.shape), off.reshape(x.shape)
