"""Small integers in the bits of larger ones."""

from __future__ import annotations

import numpy as np


def unpack_int32(packed: np.ndarray, bits: int, axis: int) -> np.ndarray:
    """Unsigned integers of 4 or 8 bits as uint8: along `axis`, 32 / bits for each int32, the lowest bits first."""
    words = np.moveaxis(packed, axis, -1)
    as_bytes = np.ascontiguousarray(words).astype("<i4", copy=False).view(np.uint8)
    if bits == 4:
        nibbles = np.empty((*as_bytes.shape, 2), np.uint8)
        np.bitwise_and(as_bytes, 15, out=nibbles[..., 0])
        np.right_shift(as_bytes, 4, out=nibbles[..., 1])
        as_bytes = nibbles.reshape(*as_bytes.shape[:-1], -1)
    return np.moveaxis(as_bytes, -1, axis)


def nibbles(packed: np.ndarray, *, high_first: bool = False) -> np.ndarray:
    """uint8 [..., n] to [..., 2 n], the low four bits of each byte first unless told."""
    out = np.empty((*packed.shape, 2), np.uint8)
    np.bitwise_and(packed, 15, out=out[..., int(high_first)])
    np.right_shift(packed, 4, out=out[..., int(not high_first)])
    return out.reshape(*packed.shape[:-1], -1)
