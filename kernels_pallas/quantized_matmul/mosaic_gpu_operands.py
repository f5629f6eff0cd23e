"""Codes as wgmma's left operand, and its matmuls.

The weight's rows are wgmma's 64 rows, so that a few rows of x fill its columns and the codes, once widened, are handed
over in registers. Each thread reads the two neighbouring codes (or bytes) that the operand's layout gives it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels_pallas.quantized_matmul.mosaic_gpu_config import PACK_BLOCK
from kernels_pallas.ragged_paged_attention.mosaic_gpu import tiles

PIECE = PACK_BLOCK // 2
"""Elements of the contracted axis that one operand in registers has."""
NIBBLE_SCALE = 16.0
"""`nibbles` are this times as large as what they stand for."""


def nibbles(packed: jax.Array, dtype: Any) -> tuple[jax.Array, jax.Array]:
    """16 * (code - 8) of the low and the high four bits of bytes, exactly, in bfloat16 or float16.

    The bits become the mantissa of a number whose exponent makes each count 16, less what the others are worth. The upper
    bit of a high nibble is bfloat16's lowest bit of exponent; flipped, it counts as a number of its own to subtract.
    """
    bits = packed.astype(jnp.uint16)

    def number(pattern: jax.Array) -> jax.Array:
        return lax.bitcast_convert_type(pattern, dtype)

    if dtype == jnp.float16:
        low = number((bits & jnp.uint16(0x0F)) | jnp.uint16(0x7400)) - dtype.type(16384 + 128)
        high = number((bits & jnp.uint16(0xF0)) | jnp.uint16(0x6400)) - dtype.type(1024 + 128)
        return low, high
    low = number((bits & jnp.uint16(0x0F)) | jnp.uint16(0x4500)) - dtype.type(2048 + 128)
    high = number((bits & jnp.uint16(0x70)) | jnp.uint16(0x4300))
    return low, high - number((bits & jnp.uint16(0x80)) ^ jnp.uint16(0x4380))


def operands(
    codes_ref: Any, x_ref: Any, codes: str, native: bool
) -> Iterator[tuple[int, Any, Any]]:
    """Left and right operands of a step's matmuls, with where on the contracted axis each pair begins.

    Args:
        codes_ref: shared memory, [64, bytes of a step].
        x_ref: shared memory, [columns, elements of a step].
    """
    size = x_ref.shape[1]

    def of_x(start: int, size: int) -> Any:
        return x_ref.at[:, pl.ds(start, size)].transpose((1, 0))

    if native:
        yield 0, codes_ref, of_x(0, size)
        return
    if codes != "uint4":
        for start in range(0, size, PIECE):
            part = tiles.load_plain(codes_ref.at[:, pl.ds(start, PIECE)], tiles.LAYOUT)
            yield start, part.astype(x_ref.dtype), of_x(start, PIECE)
        return
    for start in range(0, size, PACK_BLOCK):
        part = tiles.load_plain(codes_ref.at[:, pl.ds(start // 2, PIECE)], tiles.LAYOUT)
        low, high = nibbles(part, x_ref.dtype)
        yield start, low, of_x(start, PIECE)
        yield start + PIECE, high, of_x(start + PIECE, PIECE)


def multiply(
    pairs: Sequence[tuple[Any, Any]], acc: jax.Array | None, dtype: Any, interpret: Any
) -> jax.Array:
    """acc + the sum of the pairs' products with wgmma, waiting for it.

    The interpreter's race detector does not see what wgmma reads; see `tiles.matmul`.
    """
    if interpret:
        for a, b in pairs:
            product = tiles.matmul(a, b, None, interpret).astype(dtype)
            acc = product if acc is None else acc + product
        return acc
    if acc is None:

        def fresh(acc_ref):
            for a, b in pairs:
                plgpu.wgmma(acc_ref, a, b)
            return acc_ref[...]

        shape = (pairs[0][0].shape[0], pairs[0][1].shape[1])
        return pl.run_scoped(fresh, plgpu.ACC(shape, dtype))

    def onto(acc_ref):
        for a, b in pairs:
            plgpu.wgmma(acc_ref, a, b)

    return pl.run_state(onto)(plgpu.ACC.init(acc))


def added(
    acc: jax.Array, product: jax.Array, scales: jax.Array, offsets: jax.Array | None
) -> jax.Array:
    acc = acc + product * scales
    return acc if offsets is None else acc + offsets


def over_columns(vector: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    return lax.broadcast_in_dim(vector, shape, [0])
