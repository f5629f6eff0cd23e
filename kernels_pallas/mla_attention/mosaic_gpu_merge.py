"""Putting together the pieces of tiles that were cut, by their log-sum-exp."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels_pallas.mla_attention.mosaic_gpu_config import RANK, ROWS
from kernels_pallas.mla_attention.mosaic_gpu_memory import LN_2, copy_token_rows
from kernels_pallas.mla_attention.mosaic_gpu_plan import MlaPlan
from kernels_pallas.ragged_paged_attention.mosaic_gpu import tiles

_COLUMNS = 64
"""Of one thread block; a tile that is cut often is the only one, and has to keep the GPU busy by itself."""
_PIECES = 4
"""Loaded at a time."""


def merge(
    parts: jax.Array,
    parts_lse: jax.Array,
    plan: MlaPlan,
    out_ref: Any,
    lse_ref: Any,
    *,
    num_heads: int,
    heads: int,
    interpret: Any = None,
) -> None:
    """Write what `mosaic_gpu_attend.attend` left in pieces to `out_ref` and `lse_ref`."""
    num_runs, dtype = plan.merges.shape[0], jax.typeof(out_ref).inner_aval.dtype

    def body(parts_ref, parts_lse_ref, tiles_ref, merges_ref, out_ref, *refs):
        lse_ref = refs[0] if len(refs) == 3 else None
        out_s, lse_s = refs[-2:]
        run, head_tile, part = (lax.axis_index(name) for name in ("run", "heads", "column"))
        tile, count = merges_ref[run, 0], merges_ref[run, 1]
        rows = pl.ds(head_tile * ROWS, ROWS)
        columns = pl.ds(part * _COLUMNS, _COLUMNS)

        @pl.when(count > 0)
        def _():
            def step(i, carry):
                acc, peak, total = carry
                index = [i * _PIECES + k for k in range(_PIECES)]
                piece = [2 * run + jnp.maximum(2 * jnp.minimum(k, count - 1), 1) for k in index]
                # Past the last piece it is loaded again, with no weight.
                lses = [
                    tiles.load_plain(parts_lse_ref.at[p, rows], tiles.ROW_LAYOUT)
                    + jnp.where(k < count, 0.0, tiles.MASKED)
                    for k, p in zip(index, piece, strict=True)
                ]
                values = [
                    tiles.load_plain(parts_ref.at[p, rows, columns], tiles.LAYOUT) for p in piece
                ]
                new_peak = peak
                for lse in lses:
                    new_peak = jnp.maximum(new_peak, lse)
                fade = jnp.exp2(peak - new_peak)
                acc = acc * lax.broadcast_in_dim(fade, acc.shape, [0])
                total = total * fade
                for lse, value in zip(lses, values, strict=True):
                    weight = jnp.exp2(lse - new_peak)
                    total = total + weight
                    acc = acc + value * lax.broadcast_in_dim(weight, acc.shape, [0])
                return acc, new_peak, total

            begin = (tiles.zeros((ROWS, _COLUMNS)), tiles.no_peaks(), tiles.zeros((ROWS,)))
            rounds = lax.div(count + (_PIECES - 1), jnp.int32(_PIECES))
            acc, peak, total = lax.fori_loop(0, rounds, step, begin)
            out_s[...] = tiles.normalized(acc, total).astype(out_s.dtype)
            if lse_ref is not None:
                lse_s[...] = (peak + jnp.log2(total)) * LN_2
            plgpu.commit_smem()
            to_tokens = functools.partial(
                copy_token_rows,
                first_row=tiles_ref[tile, 1] * num_heads + head_tile * heads,
                num_tokens=tiles_ref[tile, 2],
                num_heads=num_heads,
                heads=heads,
            )
            to_tokens(out_s, lambda rows: out_ref.at[rows, columns])
            if lse_ref is not None:
                pl.when(part == 0)(lambda: to_tokens(lse_s, lambda rows: lse_ref.at[rows]))
            plgpu.wait_smem_to_gmem(0)

    outputs = (out_ref,) if lse_ref is None else (out_ref, lse_ref)
    plgpu.kernel(
        body,
        out_type=(),
        grid=(num_runs, num_heads // heads, RANK // _COLUMNS),
        grid_names=("run", "heads", "column"),
        scratch_types=[
            tiles.swizzled((ROWS, _COLUMNS), dtype),
            plgpu.SMEM((ROWS,), jnp.float32),
        ],
        compiler_params=tiles.COMPILER_PARAMS,
        kernel_name="mla_merge",
        **({"interpret": interpret} if interpret else {}),
    )(parts, parts_lse, plan.tiles, plan.merges, *outputs)
