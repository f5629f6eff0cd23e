"""Merging the parts of requests whose blocks were cut between walks of the decode kernel, by their log-sum-exp."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels_pallas.ragged_paged_attention.mosaic_gpu import columns as col
from kernels_pallas.ragged_paged_attention.mosaic_gpu import tiles
from kernels_pallas.ragged_paged_attention.mosaic_gpu.columns import ROWS, TokenWriter, parts_of
from kernels_pallas.ragged_paged_attention.mosaic_gpu.decode_plan import DecodePlan, Walk, item_of
from kernels_pallas.ragged_paged_attention.mosaic_gpu.decode_shape import DecodeShape

_REGISTERS = 64
"""Of a thread for the parts that are on their way at the same time."""


def merge_parts(
    plan: DecodePlan,
    parts: jax.Array,
    part_lse: jax.Array,
    sinks: jax.Array | None,
    out_ref: Any,
    lse_ref: Any,
    *,
    shape: DecodeShape,
    interpret: Any,
) -> None:
    """Weighted sum of the parts of each request that was cut, written into out_ref [T, N, H] and lse_ref [T, N].

    Args:
        parts: [2 * walks, H, columns] float32, normalized. A walk's part of a request that it opens is at 2 * walk + 1,
            one that came from the walk before at 2 * walk.
        part_lse: [2 * walks, columns] log-sum-exp in base 2.
        sinks: [N], they join here as the parts left them out.
    """
    if sinks is not None:
        sinks = tiles.not_slices(sinks)
    optional = {"sinks": sinks, "out": out_ref, "lse": lse_ref}
    inputs = {"rows": plan.rows, "walks": plan.walks, "parts": parts, "part_lse": part_lse}
    inputs |= {name: value for name, value in optional.items() if value is not None}
    num_walks, _ = plan.walks.shape

    def body(*refs, **scratch):
        r = SimpleNamespace(**dict(zip(inputs, refs, strict=True)), **scratch)
        index = lax.axis_index("walk")
        walk = Walk(*(r.walks[index, i] for i in range(len(Walk._fields))))

        @pl.when(walk.count > 0)
        def _():
            item = item_of(r.rows, walk, walk.count - 1)
            pl.when(item.opens & ~item.closes)(
                lambda: _merge(r, index, walk, item, shape, interpret)
            )

    plgpu.kernel(
        body,
        out_type=(),
        grid=(num_walks,),
        grid_names=("walk",),
        scratch_types={
            "out_s": col.row_major((shape.columns, shape.head_size), out_ref.dtype),
            "lse_s": plgpu.SMEM((shape.columns,), jnp.float32),
        },
        compiler_params=shape.compiler_params,
        kernel_name="paged_decode_merge",
        **({"interpret": interpret} if interpret else {}),
    )(*inputs.values())


def _merge(r: Any, index: Any, walk: Walk, item: Any, shape: DecodeShape, interpret: Any) -> None:
    """The request that walk `index` opens and does not close."""
    row, columns, starts = item.row, shape.columns, parts_of(shape.head_size)
    last_walk = lax.div(item.start + row.num_blocks - 1, walk.share)
    count = last_walk - index + 1
    at_once = max(1, _REGISTERS // (len(starts) * columns // 2))

    def step(i, carry):
        accs, peak, total = carry
        chosen = []
        for j in range(at_once):
            number = i * at_once + j
            safe = jnp.minimum(number, count - 1)
            part = 2 * (index + safe) + (safe == 0).astype(jnp.int32)
            lse = tiles.load_plain(r.part_lse.at[part], tiles.COLUMN_LAYOUT)
            lse = lse + jnp.where(number < count, 0.0, -jnp.inf)
            values = [
                tiles.load_plain(r.parts.at[part, pl.ds(start, ROWS)], tiles.LAYOUT)
                for start in starts
            ]
            chosen.append((lse, values))
        for lse, values in chosen:
            new_peak = jnp.maximum(peak, lse)
            fade, weight = jnp.exp2(peak - new_peak), jnp.exp2(lse - new_peak)
            total = total * fade + weight
            accs = tuple(
                acc * col.over_rows(fade, acc.shape) + value * col.over_rows(weight, acc.shape)
                for acc, value in zip(accs, values, strict=True)
            )
            peak = new_peak
        return accs, peak, total

    begin = (
        tuple(col.zeros((ROWS, columns)) for _ in starts),
        col.no_peaks(columns),
        col.zeros((columns,)),
    )
    accs, peak, total = lax.fori_loop(
        0, lax.div(count + (at_once - 1), jnp.int32(at_once)), step, begin
    )
    first_head = item.head * shape.group
    sinks = None
    if hasattr(r, "sinks"):
        sinks = col.sinks_of(r.sinks, first_head, shape.group, shape.heads, columns)
    factor, lse = col.finish(peak, total, sinks)
    writer = TokenWriter(
        r.out, getattr(r, "lse", None), r.out_s, r.lse_s,
        group=shape.group, heads=shape.heads, interpret=interpret,
    )  # fmt: skip
    where = (row.first_token, first_head, row.num_tokens)
    writer.stage([acc * col.over_rows(factor, acc.shape) for acc in accs])
    writer.send(*where)
    writer.write_lse(lse, *where)
    plgpu.wait_smem_to_gmem(0)
