"""Shared memory of the latent attention kernels: tiles, what is cleared in them, and copies of results out of them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels_pallas.mla_attention.mosaic_gpu_config import (
    QUERY_TILE,
    RANK_HALF,
    ROWS,
    TILE_COLUMNS,
)
from kernels_pallas.ragged_paged_attention.mosaic_gpu import tiles

LN_2 = math.log(2.0)
# wgmma's layout has 64 rows, a block of keys half of them.
_BLOCK_LAYOUT = plgpu.Layout.TILED(
    plgpu.Tiling(((32, 8), (8, 8), (2,))), warp_dims=(-5,), lane_dims=(-3, -2), vector_dim=-1
)


def opaque(value: jax.Array, count: jax.Array) -> jax.Array:
    """`value`, for a count below 2^24, which the compiler doesn't know: it then computes addresses from it where they are
    needed, and not once before the loops that change `count`, to keep them all in registers."""
    return value + lax.shift_right_logical(count, jnp.int32(24))


def swizzled(shape: tuple[int, ...], dtype: Any) -> Any:
    """Shared memory of [..., rows, columns] in tiles that wgmma and TMA understand."""
    swizzle = TILE_COLUMNS * jnp.dtype(dtype).itemsize
    transforms = (plgpu.TilingTransform((8, TILE_COLUMNS)), plgpu.SwizzleTransform(swizzle))
    return plgpu.SMEM(shape, dtype, transforms=transforms)


def clear_unused(values_s: Any, num_used: jax.Array) -> None:
    """Zero the rows of a block from num_used on: a weight of 0 times NaN would be NaN."""
    # Tile by tile, as a whole block in registers next to the results would spill.
    for start in range(0, RANK_HALF, QUERY_TILE):
        part_s = values_s.at[:, pl.ds(start, QUERY_TILE)]
        part = tiles.load_plain(part_s, _BLOCK_LAYOUT)
        row = plgpu.broadcasted_iota(jnp.int32, part.shape, 0, layout=_BLOCK_LAYOUT)
        tiles.store_plain(part_s, jnp.where(row < num_used, part, jnp.zeros_like(part)))
    plgpu.commit_smem()


def copy_token_rows(
    source_s: Any,
    target: Callable[[Any], Any],
    *,
    first_row: jax.Array,
    num_tokens: jax.Array,
    num_heads: int,
    heads: int,
) -> None:
    """Start copies of a tile's results, `heads` rows for each of its tokens: what follows them is another request's.

    `target` gives the place of a slice of rows, which are token * num_heads + head; `first_row` is the tile's first.
    """
    for token in range(ROWS // heads):

        def copy(token=token):
            rows = pl.ds(first_row + token * num_heads, heads)
            plgpu.copy_smem_to_gmem(source_s.at[pl.ds(token * heads, heads)], target(rows))

        pl.when(token < num_tokens)(copy)
