"""Merging the partial softmax results of one request's items, by their log-sum-exp."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels_pallas.ragged_paged_attention import mosaic_gpu_tiles as tiles
from kernels_pallas.ragged_paged_attention.mosaic_gpu_tiles import LAYOUT, ROW_LAYOUT, ROWS


def merge_items(parts: jax.Array, lse: jax.Array, rows: jax.Array, *, interpret: Any) -> jax.Array:
    """Weighted sum of each request's items.

    Args:
        parts: [I, 2, M, H] normalized results and their rounding errors, M a multiple of 64.
        lse: [I, M] float32 log-sum-exp in base 2.
        rows: [R, 2] int32, each request's first item and how many it has.

    Returns:
        [R, M, H] in parts' dtype; zeros for requests without items.
    """
    num_rows, (_, _, merged_rows, head_size) = rows.shape[0], parts.shape
    columns = head_size if head_size <= 128 else 128

    def body(parts_ref, lse_ref, rows_ref, out_ref, out_s):
        row, tile, part = (lax.axis_index(name) for name in ("row", "tile", "column"))
        tile_rows = pl.ds(tile * ROWS, ROWS)
        tile_columns = pl.ds(part * columns, columns)
        first, count = rows_ref[row, 0], rows_ref[row, 1]

        def step(i, carry):
            acc, peak, total = carry
            item = first + i
            lse_i = tiles.load_plain(lse_ref.at[item, tile_rows], ROW_LAYOUT)
            new_peak = jnp.maximum(peak, lse_i)
            fade, weight = jnp.exp2(peak - new_peak), jnp.exp2(lse_i - new_peak)
            for half in range(2):
                value = tiles.load_plain(parts_ref.at[item, half, tile_rows, tile_columns], LAYOUT)
                value = value.astype(jnp.float32) * lax.broadcast_in_dim(weight, value.shape, [0])
                if half == 0:
                    acc = acc * lax.broadcast_in_dim(fade, acc.shape, [0])
                acc = acc + value
            return acc, new_peak, total * fade + weight

        start = (tiles.zeros((ROWS, columns)), tiles.no_peaks(), tiles.zeros((ROWS,)))
        acc, _, total = lax.fori_loop(0, count, step, start)
        out_s[...] = tiles.normalized(acc, total).astype(out_s.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(out_s, out_ref.at[row, tile_rows, tile_columns])
        plgpu.wait_smem_to_gmem(0)

    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((num_rows, merged_rows, head_size), parts.dtype),
        grid=(num_rows, merged_rows // ROWS, head_size // columns),
        grid_names=("row", "tile", "column"),
        scratch_types=[tiles.swizzled((ROWS, columns), parts.dtype)],
        compiler_params=tiles.COMPILER_PARAMS,
        kernel_name="paged_decode_merge",
        **({"interpret": interpret} if interpret else {}),
    )(parts, lse, rows)
