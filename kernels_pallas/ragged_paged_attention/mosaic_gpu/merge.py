"""Merging the parts of requests whose blocks were cut between walks of the decode kernel, by their log-sum-exp."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NamedTuple

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


class Decoded(NamedTuple):
    """What the decode kernel leaves. Rows of tokens that it was not given hold anything."""

    out: jax.Array
    """[T, N, H] but for requests that were cut."""
    lse: jax.Array | None
    """[T, N], so too."""
    plan: DecodePlan
    parts: jax.Array
    """[2 * walks, H, columns] float32, normalized. A walk's part of a request that it opens is at 2 * walk + 1, one that
    came from the walk before at 2 * walk."""
    part_lse: jax.Array
    """[2 * walks, columns] log-sum-exp in base 2."""

    def inputs(self) -> dict[str, jax.Array]:
        """What `Merger` reads, by name."""
        rows, walks = self.plan
        return {"rows": rows, "walks": walks, "parts": self.parts, "part_lse": self.part_lse}


def merge_parts(
    decoded: Decoded, sinks: jax.Array | None, *, shape: DecodeShape, interpret: Any
) -> tuple[jax.Array, jax.Array | None]:
    """(out, lse) with the requests that were cut, in a kernel of its own.

    Args:
        sinks: [N], they join here as the parts left them out.
    """
    inputs = decoded.inputs()
    if sinks is not None:
        inputs["sinks"] = tiles.not_slices(sinks)
    written = {"out": jax.new_ref(decoded.out)}
    if decoded.lse is not None:
        written["lse"] = jax.new_ref(decoded.lse)
    inputs |= written

    def body(*refs, out_s, lse_s):
        r = SimpleNamespace(**dict(zip(inputs, refs, strict=True)))
        merger = Merger(r, shape, out_s, lse_s, columns=32, registers=64, interpret=interpret)
        merger.merge(lax.axis_index("walk"))
        plgpu.wait_smem_to_gmem(0)

    plgpu.kernel(
        body,
        out_type=(),
        grid=(decoded.plan.walks.shape[0],),
        grid_names=("walk",),
        scratch_types={
            "out_s": col.row_major((shape.columns, shape.head_size), decoded.out.dtype),
            "lse_s": plgpu.SMEM((shape.columns,), jnp.float32),
        },
        compiler_params=shape.compiler_params,
        kernel_name="paged_decode_merge",
        **({"interpret": interpret} if interpret else {}),
    )(*inputs.values())
    return jax.freeze(written["out"]), jax.freeze(written["lse"]) if "lse" in written else None


class Merger:
    """A warp group's work in whatever kernel it is done.

    Args:
        refs: `Decoded.inputs`, `sinks` if there are any, `out` [T, N, H] and, if it is wanted, `lse` [T, N].
        out_s: [at least the shape's columns, H] as it lies in global memory.
        lse_s: [the shape's columns].
        columns: at most so many at a time.
        registers: of a thread for the parts that are on their way at the same time.
    """

    def __init__(
        self, refs: SimpleNamespace, shape: DecodeShape, out_s: Any, lse_s: Any, *,
        columns: int, registers: int, interpret: Any,
    ) -> None:  # fmt: skip
        self.r, self.shape = refs, shape
        self.columns = next(n for n in range(columns, 0, -8) if shape.columns % n == 0)
        self.at_once = max(1, registers // (len(parts_of(shape.head_size)) * self.columns // 2))
        self.writer = TokenWriter(
            refs.out, getattr(refs, "lse", None), out_s, lse_s,
            group=shape.group, heads=shape.heads, interpret=interpret,
        )  # fmt: skip

    def merge(self, index: jax.Array) -> None:
        """Write the request that walk `index` opens and does not close, if there is one."""
        walk = Walk(*(self.r.walks[index, i] for i in range(len(Walk._fields))))

        @pl.when(walk.count > 0)
        def _():
            item = item_of(self.r.rows, walk, walk.count - 1)

            @pl.when(item.opens & ~item.closes)
            def _():
                last_walk = lax.div(item.start + item.row.num_blocks - 1, walk.share)
                self._merge(index, last_walk - index + 1, item)

    def _merge(self, index: jax.Array, count: jax.Array, item: Any) -> None:
        """A weighted sum of `count` walks' parts."""
        self.writer.wait()
        first_head = item.head * self.shape.group

        def of_columns(first_column):
            accs, peak, total = self._sums(index, count, first_column)
            sinks = None
            if hasattr(self.r, "sinks"):
                sinks = col.sinks_of(
                    self.r.sinks, first_head, self.shape.group, self.shape.heads, self.columns, first_column
                )  # fmt: skip
            factor, lse = col.finish(peak, total, sinks)
            self.writer.put([acc * col.over_rows(factor, acc.shape) for acc in accs], first_column)
            self.writer.put_lse(lse, first_column)

        if self.columns == self.shape.columns:
            of_columns(0)
        else:
            pl.loop(0, self.shape.columns, step=self.columns)(of_columns)
        plgpu.commit_smem()
        where = (item.row.first_token, first_head, item.row.num_tokens)
        self.writer.send(*where)
        self.writer.write_lse(*where)

    def _sums(self, index: jax.Array, count: jax.Array, first_column: Any) -> tuple[Any, Any, Any]:
        """(accumulators, peaks, totals) of some columns."""
        starts, columns = parts_of(self.shape.head_size), pl.ds(first_column, self.columns)
        at_once = self.at_once

        def step(i, carry):
            accs, peak, total = carry
            chosen = []
            for j in range(at_once):
                number = i * at_once + j
                safe = jnp.minimum(number, count - 1)
                part = 2 * (index + safe) + (safe == 0).astype(jnp.int32)
                lse = tiles.load_plain(self.r.part_lse.at[part, columns], tiles.COLUMN_LAYOUT)
                lse = lse + jnp.where(number < count, 0.0, -jnp.inf)
                values = [
                    tiles.load_plain(self.r.parts.at[part, pl.ds(start, ROWS), columns], tiles.LAYOUT)
                    for start in starts
                ]  # fmt: skip
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
            tuple(col.zeros((ROWS, self.columns)) for _ in starts),
            col.no_peaks(self.columns),
            col.zeros((self.columns,)),
        )
        rounds = lax.div(count + (at_once - 1), jnp.int32(at_once))
        return lax.fori_loop(0, rounds, step, begin)
