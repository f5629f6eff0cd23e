"""GGML's block formats as codes and scales. Layouts: ggml-quants.c (`dequantize_row_*`) and ggml-common.h.

Types that are not among `FORMATS` (Q2_K, Q3_K, IQ4_NL, IQ4_XS) are only read dequantized.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from jaxinfer.weights.gguf_quants import BLOCK_BYTES, fifth_bits, k_scales, nibble_runs
from jaxinfer.weights.quantization.matrix import MatrixFormat, QuantizedMatrix

Arrays = dict[str, np.ndarray]


def _half(blocks: np.ndarray, start: int) -> np.ndarray:
    """float16 at byte `start` of each block, [blocks, 1]."""
    return blocks[:, start : start + 2].copy().view("<f2")


def _q4_0(blocks: np.ndarray) -> Arrays:
    return {"codes": nibble_runs(blocks[:, 2:]), "scales": _half(blocks, 0)}


def _q4_1(blocks: np.ndarray) -> Arrays:
    codes = nibble_runs(blocks[:, 4:])
    return {"codes": codes, "scales": _half(blocks, 0), "minima": _half(blocks, 2)}


def _q5_0(blocks: np.ndarray) -> Arrays:
    codes = nibble_runs(blocks[:, 6:]) | fifth_bits(blocks, 2)
    return {"codes": codes, "scales": _half(blocks, 0)}


def _q5_1(blocks: np.ndarray) -> Arrays:
    codes = nibble_runs(blocks[:, 8:]) | fifth_bits(blocks, 4)
    return {"codes": codes, "scales": _half(blocks, 0), "minima": _half(blocks, 2)}


def _q8_0(blocks: np.ndarray) -> Arrays:
    return {"codes": blocks[:, 2:].view(np.int8), "scales": _half(blocks, 0)}


def _two_levels(blocks: np.ndarray) -> Arrays:
    scales, minima = k_scales(blocks[:, 4:16])
    return {
        "scales": scales,
        "minima": minima,
        "super_scales": _half(blocks, 0),
        "super_minima": -_half(blocks, 2),  # k-quants subtract their minima
    }


def _q4_k(blocks: np.ndarray) -> Arrays:
    # Each run of 32 bytes holds one group low and the next one high.
    return {"codes": nibble_runs(blocks[:, 16:144].reshape(-1, 32)), **_two_levels(blocks)}


def _q5_k(blocks: np.ndarray) -> Arrays:
    low = nibble_runs(blocks[:, 48:176].reshape(-1, 32)).reshape(-1, 8, 32)
    high = np.unpackbits(blocks[:, 16:48, None], axis=2, bitorder="little").transpose(0, 2, 1)
    return {"codes": low | (high << 4), **_two_levels(blocks)}


def _q6_k(blocks: np.ndarray) -> Arrays:
    # Two halves of 128 weights; in each, 64 bytes give the low nibbles and 32 bytes four pairs of high bits.
    low = nibble_runs(blocks[:, :128].reshape(-1, 64)).reshape(-1, 2, 4, 32)
    shifts = np.array([0, 2, 4, 6], np.uint8)[:, None]
    high = (blocks[:, 128:192].reshape(-1, 2, 1, 32) >> shifts) & 3
    return {
        "codes": low | (high << 4),
        "scales": blocks[:, 192:208].view(np.int8),
        "super_scales": _half(blocks, 208),
    }


FORMATS: dict[str, MatrixFormat] = {
    "Q4_0": MatrixFormat("uint4", 32, "float16", zero=8),
    "Q4_1": MatrixFormat("uint4", 32, "float16", minima="float16"),
    "Q5_0": MatrixFormat("uint5", 32, "float16", zero=16),
    "Q5_1": MatrixFormat("uint5", 32, "float16", minima="float16"),
    "Q8_0": MatrixFormat("int8", 32, "float16"),
    "Q4_K": MatrixFormat("uint4", 32, "uint8", minima="uint8", super_group_size=256),
    "Q5_K": MatrixFormat("uint5", 32, "uint8", minima="uint8", super_group_size=256),
    "Q6_K": MatrixFormat("uint6", 16, "int8", zero=32, super_group_size=256),
}
"""The types that can stay quantized in memory."""

_SPLITS: dict[str, Callable[[np.ndarray], Arrays]] = {
    "Q4_0": _q4_0, "Q4_1": _q4_1, "Q5_0": _q5_0, "Q5_1": _q5_1, "Q8_0": _q8_0, "Q4_K": _q4_k, "Q5_K": _q5_k, "Q6_K": _q6_k,
}  # fmt: skip


def matrix_of(type_name: str, raw: np.ndarray) -> QuantizedMatrix:
    """Rows `raw` [rows, bytes] of one of `FORMATS`."""
    arrays = _SPLITS[type_name](raw.reshape(-1, BLOCK_BYTES[type_name]))
    return QuantizedMatrix(
        FORMATS[type_name],
        {name: np.ascontiguousarray(a).reshape(len(raw), -1) for name, a in arrays.items()},
    )
