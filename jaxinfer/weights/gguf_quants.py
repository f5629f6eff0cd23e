"""GGML's block formats to floating point, a few rows at a time so that the work stays in the cache.

Formulas: ggml-quants.c (`dequantize_row_*`). The order of the operations is the one of `gguf.quants`, so results are
equal bit by bit; `gguf.quants` handles the rarer types here, at 4 to 12 ns a weight where these take 1 to 2.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

CHUNK_ELEMENTS = 1 << 17


def _halves(blocks: np.ndarray, start: int) -> np.ndarray:
    """float16 at byte `start` of each block, as float32 [blocks, 1]."""
    return blocks[:, start : start + 2].copy().view("<f2").astype(np.float32)


def nibble_runs(packed: np.ndarray) -> np.ndarray:
    """[N, B] bytes to [N, 2B]: all low nibbles, then all high ones."""
    out = np.empty((packed.shape[0], 2, packed.shape[1]), np.uint8)
    np.bitwise_and(packed, 15, out=out[:, 0])
    np.right_shift(packed, 4, out=out[:, 1])
    return out.reshape(packed.shape[0], -1)


def fifth_bits(blocks: np.ndarray, start: int) -> np.ndarray:
    """The 32 bits at byte `start` of each block as [N, 32], each worth 16."""
    bits = np.unpackbits(blocks[:, start : start + 4], axis=1, bitorder="little")
    return bits << 4


def _q4_0(blocks: np.ndarray) -> np.ndarray:
    return _halves(blocks, 0) * (nibble_runs(blocks[:, 2:]).view(np.int8) - np.int8(8))


def _q4_1(blocks: np.ndarray) -> np.ndarray:
    values = _halves(blocks, 0) * nibble_runs(blocks[:, 4:])
    values += _halves(blocks, 2)
    return values


def _q5_0(blocks: np.ndarray) -> np.ndarray:
    values = (nibble_runs(blocks[:, 6:]) | fifth_bits(blocks, 2)).view(np.int8) - np.int8(16)
    return _halves(blocks, 0) * values


def _q5_1(blocks: np.ndarray) -> np.ndarray:
    values = _halves(blocks, 0) * (nibble_runs(blocks[:, 8:]) | fifth_bits(blocks, 4))
    values += _halves(blocks, 2)
    return values


def _q8_0(blocks: np.ndarray) -> np.ndarray:
    return blocks[:, 2:].view(np.int8) * _halves(blocks, 0)


def k_scales(packed: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The 6-bit scales and minima of the 8 sub-blocks, packed in 12 bytes: [N, 12] to two [N, 8]."""
    low, mid, high = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    scales = np.concatenate([low & 63, (high & 15) | ((low >> 2) & 48)], axis=1)
    minima = np.concatenate([mid & 63, (high >> 4) | ((mid >> 2) & 48)], axis=1)
    return scales, minima


def _scaled_minus_minimum(blocks: np.ndarray, quants: np.ndarray) -> np.ndarray:
    """d * scale * quant - dmin * minimum per sub-block of 32, for quants [N, 8, 32]."""
    scales, minima = k_scales(blocks[:, 4:16])
    values = (_halves(blocks, 0) * scales)[:, :, None] * quants
    values -= (_halves(blocks, 2) * minima)[:, :, None]
    return values


def _q4_k_quants(packed: np.ndarray) -> np.ndarray:
    """[N, 128] bytes to [N, 8, 32]: each run of 32 bytes holds one sub-block low and the next one high."""
    return nibble_runs(packed.reshape(-1, 32)).reshape(-1, 8, 32)


def _q4_k(blocks: np.ndarray) -> np.ndarray:
    return _scaled_minus_minimum(blocks, _q4_k_quants(blocks[:, 16:144]))


def _q5_k(blocks: np.ndarray) -> np.ndarray:
    high = np.unpackbits(blocks[:, 16:48, None], axis=2, bitorder="little")
    quants = _q4_k_quants(blocks[:, 48:176]) | (high.transpose(0, 2, 1) << 4)
    return _scaled_minus_minimum(blocks, quants)


def _q6_k(blocks: np.ndarray) -> np.ndarray:
    count = len(blocks)
    # Two halves of 128 weights; in each, 64 bytes give the low nibbles and 32 bytes four pairs of high bits.
    low = nibble_runs(blocks[:, :128].reshape(-1, 64)).reshape(count, 2, 4, 32)
    high = blocks[:, 128:192].reshape(count, 2, 1, 32) >> np.array([0, 2, 4, 6], np.uint8)[:, None]
    quants = (low | ((high & 3) << 4)).view(np.int8) - np.int8(32)
    scales = _halves(blocks, 208) * blocks[:, 192:208].view(np.int8)
    return scales[:, :, None] * quants.reshape(count, 16, 16)


BLOCK_BYTES = {
    "Q4_0": 18, "Q4_1": 20, "Q5_0": 22, "Q5_1": 24, "Q8_0": 34, "Q4_K": 144, "Q5_K": 176, "Q6_K": 210,
}  # fmt: skip
# From blocks [N, bytes] to N * block length float32.
_CONVERSIONS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "Q4_0": _q4_0, "Q4_1": _q4_1, "Q5_0": _q5_0, "Q5_1": _q5_1, "Q8_0": _q8_0, "Q4_K": _q4_k, "Q5_K": _q5_k, "Q6_K": _q6_k,
}  # fmt: skip
_PLAIN = {"F32": np.dtype("<f4"), "F16": np.dtype("<f2")}


def dequantize_rows(type_name: str, raw: np.ndarray, out: np.ndarray) -> None:
    """Write rows `raw` [rows, bytes] of GGML type `type_name` into `out` [rows, columns], of any float dtype."""
    rows, columns = out.shape
    step = max(1, CHUNK_ELEMENTS // max(columns, 1))
    for start in range(0, rows, step):
        part = slice(start, min(start + step, rows))
        out[part] = _to_float(type_name, raw[part]).reshape(-1, columns)


def _to_float(type_name: str, raw: np.ndarray) -> np.ndarray:
    if type_name in _PLAIN:
        return raw.view(_PLAIN[type_name])
    if type_name == "BF16":
        return (raw.view("<u2").astype(np.uint32) << 16).view(np.float32)
    if type_name in _CONVERSIONS:
        return _CONVERSIONS[type_name](raw.reshape(-1, BLOCK_BYTES[type_name]))
    import gguf

    return gguf.dequantize(raw, gguf.GGMLQuantizationType[type_name])
