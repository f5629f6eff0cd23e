"""Grouped matmul as a Pallas Mosaic GPU kernel for Hopper: TMA and wgmma, one launch for all groups.

The rows of each group are cut into tiles of 64 or 128, so that a tile has one matrix; a tile's last rows may be the next
group's, and are not written. An item of work is a tile and some columns of the result. Thread blocks, one per core, take
items in turn, the tiles of neighbouring items being neighbours, so that those of one group read a part of its matrix at the
same time, out of the second-level cache. One warp group loads, and runs ahead into the next items; the others multiply.
"""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels_pallas.grouped_matmul.mosaic_gpu_config import (
    ROWS,
    STEP,
    Config,
    config_for,
    unsupported,
)
from kernels_pallas.ragged_paged_attention.mosaic_gpu import tiles
from kernels_pallas.ragged_paged_attention.xla_pages import vary_like

_ALIGNMENT = 8
"""Rows: TMA brings tiles of eight, so that is where a group begins."""


class TilePlan(NamedTuple):
    tiles: jax.Array
    """[tiles, 4] int32: group, first aligned row, first row, number of rows left of the group from there on."""
    count: jax.Array
    """[1] int32: how many of them are used."""
    source: jax.Array
    """[aligned rows] int32: the row that stands there, each group's first at a multiple of eight. Those between groups and
    after them are copies of any."""


def plan_tiles(
    group_sizes: jax.Array, first_row: jax.Array, num_rows: int, tile_rows: int
) -> TilePlan:
    """The tiles of the groups that have rows, in order."""
    num_groups = group_sizes.shape[0]
    most_used = min(num_groups, num_rows)
    starts = first_row + jnp.cumsum(group_sizes) - group_sizes
    aligned_ends = jnp.cumsum(-(-group_sizes // _ALIGNMENT) * _ALIGNMENT)
    tiles_until = jnp.cumsum(-(-group_sizes // tile_rows))

    def place(positions: jax.Array, ends: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The group in whose part of a list each position is, and where in it."""
        group = jnp.searchsorted(ends, positions, side="right").astype(jnp.int32)
        group = jnp.minimum(group, num_groups - 1)
        return group, positions - jnp.where(group > 0, ends[group - 1], 0)

    group, tile = place(jnp.arange(most_used + num_rows // tile_rows, dtype=jnp.int32), tiles_until)
    aligned_starts = jnp.where(group > 0, aligned_ends[group - 1], 0)
    offset = tile * tile_rows
    columns = (group, aligned_starts + offset, starts[group] + offset, group_sizes[group] - offset)
    # A tile always reads all of its rows.
    num_aligned = num_rows + most_used * (_ALIGNMENT - 1) + tile_rows
    num_aligned += -num_aligned % _ALIGNMENT
    row_group, row = place(jnp.arange(num_aligned, dtype=jnp.int32), aligned_ends)
    return TilePlan(
        jnp.stack(columns, axis=1).astype(jnp.int32),
        tiles_until[-1:].astype(jnp.int32),
        jnp.clip(starts[row_group] + row, 0, num_rows - 1),
    )


def grouped_matmul(
    rows_mk: jax.Array,
    weights_gnk: jax.Array,
    group_sizes: jax.Array,
    first_row: jax.Array,
    *,
    dtype: jnp.dtype,
    config: Config | None = None,
    interpret: Any = None,
) -> jax.Array:
    """See `api.grouped_matmul`.

    Args:
        config: sizes of the kernel; None takes those of `config_for`.
        interpret: `plgpu.InterpretGPUParams` to run on a CPU.

    Raises:
        ValueError: shapes that `mosaic_gpu_config.unsupported` names.
    """
    reason = unsupported(rows_mk, weights_gnk, dtype)
    if reason is not None:
        raise ValueError(f"The Mosaic GPU backend does not take this call: {reason}.")
    num_rows = rows_mk.shape[0]
    num_groups, num_outputs, size = weights_gnk.shape
    config = config or config_for(num_rows, num_groups, num_outputs, dtype)
    plan = plan_tiles(group_sizes, first_row, num_rows, config.tile_rows)
    item = rows_mk.dtype
    names = ("rows", "weights", "tiles", "count", "out", "rows_s", "weights_s", "out_s")
    out = jax.new_ref(jnp.zeros((num_rows, num_outputs), dtype))
    plgpu.kernel(
        functools.partial(
            _body, names=(*names, "loaded", "freed"), num_steps=size // STEP,
            num_blocks=num_outputs // config.columns, config=config,
        ),
        out_type=(),
        grid=(config.cores,),
        grid_names=("core",),
        num_threads=config.consumers + 1,
        thread_name="warp_group",
        scratch_types=(
            tiles.swizzled((config.stages, config.consumers, ROWS, STEP), item),
            tiles.swizzled((config.stages, config.columns, STEP), item),
            plgpu.SMEM((config.consumers, ROWS, config.columns), dtype),
            plgpu.Barrier(num_arrivals=config.consumers + 1, num_barriers=config.stages),
            plgpu.Barrier(num_arrivals=config.consumers, num_barriers=config.stages),
        ),
        compiler_params=tiles.COMPILER_PARAMS,
        kernel_name="grouped_matmul",
        **({"interpret": interpret} if interpret else {}),
    )(
        rows_mk[plan.source], weights_gnk, plan.tiles, plan.count, out,
    )  # fmt: skip
    # A kernel's result doesn't say over which mesh axes it differs.
    (result,) = vary_like((jax.freeze(out),), rows_mk, weights_gnk, group_sizes)
    return result


def _body(
    *arrays: Any, names: tuple[str, ...], num_steps: int, num_blocks: int, config: Config
) -> None:
    refs = SimpleNamespace(**dict(zip(names, arrays, strict=True)))
    warp_group = lax.axis_index("warp_group")
    work = _Work(refs, num_blocks, num_steps, config)

    @pl.when(warp_group < config.consumers)
    def _():
        _consume(refs, work, warp_group)

    @pl.when(warp_group == config.consumers)
    def _():
        _produce(refs, work)


class _Item(NamedTuple):
    group: jax.Array
    aligned_row: jax.Array
    first_row: jax.Array
    rows_left: jax.Array
    column: jax.Array


class _Work:
    """This core's share: every `cores`-th item, an item being a tile and a block of columns."""

    def __init__(self, refs: SimpleNamespace, num_blocks: int, num_steps: int, config: Config):
        self.refs, self.num_steps, self.config = refs, num_steps, config
        self.num_tiles = refs.count[0]
        self.core = lax.axis_index("core")
        cores = jnp.int32(config.cores)
        total = self.num_tiles * num_blocks
        self.num_items = lax.div(total + (cores - 1) - self.core, cores)

    def item(self, i: jax.Array) -> _Item:
        item = self.core + i * self.config.cores
        tile = lax.rem(item, self.num_tiles)
        block = lax.div(item, self.num_tiles)
        return _Item(*(self.refs.tiles[tile, k] for k in range(4)), block * self.config.columns)


def _produce(refs: SimpleNamespace, work: _Work) -> None:
    config, stages = work.config, jnp.int32(work.config.stages)

    def one_item(i, filled):
        item = work.item(i)

        @pl.loop(0, work.num_steps)
        def _(step):
            slot = lax.rem(filled + step, stages)
            pl.when(filled + step >= stages)(lambda: plgpu.barrier_wait(refs.freed.at[slot]))
            columns = pl.ds(step * STEP, STEP)
            for consumer in range(config.consumers):
                first_row = pl.multiple_of(item.aligned_row, _ALIGNMENT) + consumer * ROWS
                plgpu.copy_gmem_to_smem(
                    refs.rows.at[pl.ds(first_row, ROWS), columns],
                    refs.rows_s.at[slot, consumer],
                    refs.loaded.at[slot],
                )
            plgpu.copy_gmem_to_smem(
                refs.weights.at[item.group, pl.ds(item.column, config.columns), columns],
                refs.weights_s.at[slot],
                refs.loaded.at[slot],
            )

        return filled + work.num_steps

    filled = lax.fori_loop(0, work.num_items, one_item, jnp.int32(0))

    # Whoever waits on a barrier sees all its phases.
    @pl.loop(0, jnp.minimum(filled, stages))
    def _(slot):
        plgpu.barrier_wait(refs.freed.at[slot])


def _consume(refs: SimpleNamespace, work: _Work, consumer: jax.Array) -> None:
    config, stages = work.config, jnp.int32(work.config.stages)

    def one_item(i, done):
        item = work.item(i)

        def accumulate(acc_ref):
            @pl.loop(0, work.num_steps)
            def _(step):
                slot = lax.rem(done + step, stages)
                plgpu.barrier_wait(refs.loaded.at[slot])
                rows, weights = refs.rows_s.at[slot, consumer], refs.weights_s.at[slot]
                plgpu.wgmma(acc_ref, rows, weights.transpose((1, 0)))
                # Only the previous step's matmul is surely over.
                plgpu.wgmma_wait(1)
                before = lax.rem(done + step - 1, stages)
                pl.when(step > 0)(lambda: plgpu.barrier_arrive(refs.freed.at[before]))

            plgpu.wgmma_wait(0)
            plgpu.barrier_arrive(refs.freed.at[lax.rem(done + work.num_steps - 1, stages)])
            return acc_ref[...]

        acc = pl.run_scoped(accumulate, plgpu.ACC((ROWS, config.columns), jnp.float32))
        out_s = refs.out_s.at[consumer]
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        tiles.store_plain(out_s, acc.astype(out_s.dtype))
        plgpu.commit_smem()
        before = consumer * ROWS
        count = jnp.clip(item.rows_left - before, 0, ROWS)
        _write_rows(out_s, refs.out, item.first_row + before, count, item.column)
        return done + work.num_steps

    lax.fori_loop(0, work.num_items, one_item, jnp.int32(0))
    plgpu.wait_smem_to_gmem(0)


def _write_rows(
    out_s: Any, out_ref: Any, first_row: jax.Array, count: jax.Array, column: jax.Array
) -> None:
    """Start copies of the first `count` rows, in pieces of 64, 32, 16 … rows: those that the number is made of, as a
    copy's size is fixed."""
    columns = pl.ds(column, out_s.shape[1])
    size = ROWS
    while size:

        def copy(size=size):
            # What the larger pieces have brought.
            start = count & ~jnp.int32(2 * size - 1)
            plgpu.copy_smem_to_gmem(
                out_s.at[pl.ds(start, size)], out_ref.at[pl.ds(first_row + start, size), columns]
            )

        pl.when((count & size) != 0)(copy)
        size //= 2
