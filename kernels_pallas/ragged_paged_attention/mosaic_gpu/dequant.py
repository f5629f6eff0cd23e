"""8-bit keys and values as operands of 16-bit matmuls.

float8_e4m3fn and int8 are exact in float16, and Hopper converts two e4m3 numbers to float16 with one instruction (bfloat16
takes a detour over float32), so attention over an 8-bit cache computes in float16 whatever the queries' dtype.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels_pallas.ragged_paged_attention.mosaic_gpu import tiles

_FLOAT16_MAX = 65504.0
# A thread reads 4 neighbouring numbers, 32 bits, and writes 64.
_LAYOUT = plgpu.Layout.WGMMA_UPCAST_2X


def is_narrow(dtype: Any) -> bool:
    return jnp.dtype(dtype).itemsize == 1


def compute_dtype(q_dtype: Any, page_dtype: Any) -> Any:
    """Of the matmuls' operands."""
    return jnp.dtype(jnp.float16) if is_narrow(page_dtype) else jnp.dtype(q_dtype)


def to_compute(q: jax.Array, dtype: Any, k_scale: jax.Array | None = None) -> jax.Array:
    """Queries as operands, times the keys' scale; beyond float16's range they saturate."""
    if k_scale is None and q.dtype == dtype:
        return q
    wide = q.astype(jnp.float32)
    if k_scale is not None:
        wide = wide * k_scale
    if dtype == jnp.float16:
        wide = jnp.clip(wide, -_FLOAT16_MAX, _FLOAT16_MAX)
    return wide.astype(dtype)


def widen(
    narrow_ref: Any,
    wide_ref: Any,
    end: jax.Array | None = None,
    *,
    columns: int | None = None,
) -> None:
    """Write 8-bit narrow_ref [rows, H] as float16 to wide_ref [rows, H], both in tiles in shared memory.

    With `end`, rows from there on become 0: what stale memory holds may be NaN, and a weight of 0 times NaN is NaN.

    Args:
        columns: read and written at once, whole tiles of both; None takes the wider of the two's usual tiles.
    """
    rows, head_size = narrow_ref.shape
    columns = columns or max(tiles.tile_columns(head_size), tiles.tile_columns(head_size, 1))
    # Tile by tile, as a whole block in registers would spill.
    for start in range(0, head_size, columns):
        part = (slice(None), pl.ds(start, columns))
        wide = plgpu.load(narrow_ref.at[part], layout=_LAYOUT, optimized=False)
        wide = wide.astype(wide_ref.dtype)
        if end is not None:
            row = plgpu.broadcasted_iota(jnp.int32, (rows, columns), 0, layout=_LAYOUT)
            wide = jnp.where(row < end, wide, jnp.zeros_like(wide))
        wide_ref[part] = wide
    plgpu.commit_smem()
