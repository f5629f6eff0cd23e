"""Quantized matmul as a Pallas Mosaic GPU kernel for Hopper: TMA brings codes as they are, registers widen them, wgmma.

An item of work is 64 or 128 of the weight's rows, some rows of x and a part of the contracted axis. Thread blocks, one per
core, take items in turn. One warp group loads codes and x, and runs ahead into the next items; the others multiply. A group's
products are added up by wgmma without its scale, which the sum is multiplied by in float32: nothing is rounded but x.
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

from kernels_pallas.quantized_matmul.activations import quantize_activations
from kernels_pallas.quantized_matmul.mosaic_gpu_config import (
    GROUPS,
    ROWS,
    STEP,
    Config,
    Operands,
    config_for,
    unsupported,
)
from kernels_pallas.quantized_matmul.mosaic_gpu_operands import (
    NIBBLE_SCALE,
    PIECE,
    added,
    multiply,
    operands,
    over_columns,
)
from kernels_pallas.quantized_matmul.weight import QuantizedWeight
from kernels_pallas.ragged_paged_attention.mosaic_gpu import columns as col
from kernels_pallas.ragged_paged_attention.mosaic_gpu import tiles
from kernels_pallas.ragged_paged_attention.xla_pages import vary_like


def quantized_matmul(
    x_mk: jax.Array,
    weight: QuantizedWeight,
    *,
    dtype: jnp.dtype,
    config: Config | None = None,
    interpret: Any = None,
) -> jax.Array:
    """See `api.quantized_matmul`; the weight is [N, K].

    Args:
        config: sizes of the kernel; None takes those of `config_for`.
        interpret: `plgpu.InterpretGPUParams` to run on a CPU.

    Raises:
        ValueError: shapes and formats that `mosaic_gpu_config.unsupported` names.
    """
    num_outputs, size = weight.shape
    reason = unsupported(x_mk, (num_outputs, size), weight.format, dtype)
    if reason is not None:
        raise ValueError(f"The Mosaic GPU backend does not take this call: {reason}.")
    kinds = Operands.of(weight.format)
    num_rows = x_mk.shape[0]
    config = config or config_for(num_rows, num_outputs, size, kinds, dtype)
    x_scales = None
    if kinds.native:
        x_mk, x_scales = quantize_activations(x_mk, weight)
    padding = -num_rows % config.columns
    x_mk = jnp.pad(x_mk, ((0, padding), (0, 0)))
    arrays = {"x": x_mk, "codes": _codes_of(weight), "scales": weight.scales}
    if kinds.offsets:
        for name in ("zeros", "minima"):
            if getattr(weight, name) is not None:
                arrays[name] = getattr(weight, name)
    if kinds.sums:
        if x_scales is None:
            groups = x_mk.astype(jnp.float32).reshape(x_mk.shape[0], -1, weight.format.group_size)
            sums = groups.sum(axis=-1)
        else:
            sums = jnp.pad(x_scales, ((0, padding), (0, 0)))
        arrays["sums"] = sums.T
    written = jnp.float32 if config.parts > 1 or kinds.scaled_after else dtype
    scratch = _scratch(config, arrays["x"].dtype, arrays["codes"].dtype, written)
    shape = (config.parts, num_outputs, *x_mk.shape[:1])
    out = plgpu.kernel(
        functools.partial(
            _body, names=(*arrays, "out", *scratch), zero=weight.format.zero, config=config,
            interpret=interpret,
        ),
        out_type=jax.ShapeDtypeStruct(shape, written),
        grid=(config.cores,),
        grid_names=("core",),
        num_threads=config.consumers + 1,
        thread_name="warp_group",
        scratch_types=tuple(scratch.values()),
        compiler_params=tiles.COMPILER_PARAMS,
        kernel_name="quantized_matmul",
        **({"interpret": interpret} if interpret else {}),
    )(*arrays.values())  # fmt: skip
    out = (out[0] if config.parts == 1 else out.sum(axis=0)).T[:num_rows]
    if kinds.scaled_after:
        out = out * x_scales
    # A kernel's result doesn't say over which mesh axes it differs.
    (result,) = vary_like((out.astype(dtype),), x_mk, weight.codes)
    return result


def _codes_of(weight: QuantizedWeight) -> jax.Array:
    if weight.format.codes == "e4m3":
        return lax.bitcast_convert_type(weight.codes, jnp.float8_e4m3fn)
    return weight.codes


def _scratch(config: Config, x_dtype: Any, code_dtype: Any, written: Any) -> dict[str, Any]:
    kinds, stages = config.operands, config.stages
    columns, groups = config.columns, kinds.groups_per_step
    # What registers hold begins at multiples of half a block, what wgmma reads from memory are whole tiles.
    piece = STEP if kinds.native else PIECE
    found = {
        "codes_s": tiles.swizzled(
            (stages, config.consumers, ROWS, STEP * kinds.bits // 8), code_dtype, piece
        ),
        "x_s": tiles.swizzled((stages, columns, STEP), x_dtype, piece),
        "out_s": plgpu.SMEM((config.consumers, ROWS, columns), written),
    }
    if kinds.sums:
        found["sums_s"] = plgpu.SMEM((stages, groups, columns), jnp.float32)
    if kinds.group_size is not None:
        for name in ("scales_s", "offsets_s")[: 1 + kinds.offsets]:
            found[name] = plgpu.SMEM((config.consumers, 2, GROUPS, ROWS), jnp.float32)
    arrivals = config.consumers + (2 if kinds.sums else 1)
    found["loaded"] = plgpu.Barrier(num_arrivals=arrivals, num_barriers=stages)
    found["freed"] = plgpu.Barrier(num_arrivals=config.consumers, num_barriers=stages)
    return found


def _body(*arrays: Any, names: tuple[str, ...], zero: int, config: Config, interpret: Any) -> None:
    refs = SimpleNamespace(**dict(zip(names, arrays, strict=True)))
    warp_group = lax.axis_index("warp_group")
    work = _Work(refs, config)

    @pl.when(warp_group < config.consumers)
    def _():
        _Consumer(refs, work, warp_group, zero, interpret).run()

    @pl.when(warp_group == config.consumers)
    def _():
        _produce(refs, work)


class _Item(NamedTuple):
    output: jax.Array
    """The first of the weight's rows."""
    row: jax.Array
    """The first of those of x."""
    part: jax.Array
    first_step: jax.Array
    num_steps: jax.Array


class _Work:
    """This core's share: every `cores`-th item; neighbours share the weight's rows."""

    def __init__(self, refs: SimpleNamespace, config: Config):
        self.config = config
        num_rows, size = refs.x.shape
        self.num_steps = size // STEP
        self.num_units = -(-self.num_steps // config.operands.unit)
        self.tiles_of_x = num_rows // config.columns
        total = refs.codes.shape[0] // config.tile_rows * config.parts * self.tiles_of_x
        self.core = lax.axis_index("core")
        cores = jnp.int32(config.cores)
        self.num_items = lax.div(jnp.int32(total) + (cores - 1) - self.core, cores)

    def item(self, i: jax.Array) -> _Item:
        config, unit = self.config, self.config.operands.unit
        index = self.core + i * config.cores
        tile, rest = _divided(index, self.tiles_of_x)
        part, rows = _divided(rest, config.parts)

        def step(part: jax.Array) -> jax.Array:
            first_unit = lax.div(part * self.num_units, jnp.int32(config.parts))
            return jnp.minimum(first_unit * unit, self.num_steps)

        return _Item(
            rows * config.tile_rows,
            tile * config.columns,
            part,
            step(part),
            step(part + 1) - step(part),
        )


def _divided(x: jax.Array, by: int) -> tuple[jax.Array, jax.Array]:
    """Remainder and quotient."""
    if by == 1:
        return jnp.int32(0), x
    return lax.rem(x, jnp.int32(by)), lax.div(x, jnp.int32(by))


def _produce(refs: SimpleNamespace, work: _Work) -> None:
    config, kinds = work.config, work.config.operands
    stages, step_bytes = jnp.int32(config.stages), STEP * kinds.bits // 8

    def one_item(i, filled):
        item = work.item(i)
        rows = pl.ds(pl.multiple_of(item.row, config.columns), config.columns)

        @pl.loop(0, item.num_steps)
        def _(i):
            slot = lax.rem(filled + i, stages)
            pl.when(filled + i >= stages)(lambda: plgpu.barrier_wait(refs.freed.at[slot]))
            step = item.first_step + i
            codes = pl.ds(step * step_bytes, step_bytes)
            copies = [(refs.x.at[rows, pl.ds(step * STEP, STEP)], refs.x_s.at[slot])]
            for consumer in range(config.consumers):
                outputs = pl.ds(pl.multiple_of(item.output, ROWS) + consumer * ROWS, ROWS)
                copies.append((refs.codes.at[outputs, codes], refs.codes_s.at[slot, consumer]))
            if kinds.sums:
                groups = kinds.groups_per_step
                sums = refs.sums.at[pl.ds(step * groups, groups), rows]
                copies.append((sums, refs.sums_s.at[slot]))
            for source, place in copies:
                plgpu.copy_gmem_to_smem(source, place, refs.loaded.at[slot])

        return filled + item.num_steps

    filled = lax.fori_loop(0, work.num_items, one_item, jnp.int32(0))

    # Whoever waits on a barrier sees all its phases.
    @pl.loop(0, jnp.minimum(filled, stages))
    def _(slot):
        plgpu.barrier_wait(refs.freed.at[slot])


class _Consumer:
    """A warp group that multiplies: 64 of the weight's rows by the item's rows of x, [64, columns]."""

    def __init__(
        self, refs: SimpleNamespace, work: _Work, index: jax.Array, zero: int, interpret: Any
    ):
        self.refs, self.work, self.index = refs, work, index
        self.zero, self.interpret = zero, interpret
        self.config, self.kinds = work.config, work.config.operands
        self.is_integer = self.kinds.native and self.kinds.codes == "int8"
        self.names = [name for name in ("scales", "zeros", "minima") if hasattr(refs, name)]
        self.scale = 1 / NIBBLE_SCALE if self.kinds.codes == "uint4" else 1.0

    def run(self) -> None:
        def one_item(i, carry):
            done, kept = carry
            item = self.work.item(i)
            output = pl.multiple_of(item.output + self.index * ROWS, ROWS)
            if self.kinds.group_size is None:
                acc = self.by_row(item, output, done)
            else:
                acc, kept = self.by_groups(item, output, done, kept)
            self.write(item, output, acc)
            return done + item.num_steps, kept

        lax.fori_loop(0, self.work.num_items, one_item, (jnp.int32(0), jnp.int32(0)))
        plgpu.wait_smem_to_gmem(0)

    def write(self, item: _Item, output: jax.Array, acc: jax.Array) -> None:
        refs, out_s = self.refs, self.refs.out_s.at[self.index]
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        tiles.store_plain(out_s, acc.astype(out_s.dtype))
        plgpu.commit_smem()
        rows = pl.ds(pl.multiple_of(item.row, self.config.columns), self.config.columns)
        plgpu.copy_smem_to_gmem(out_s, refs.out.at[item.part, pl.ds(output, ROWS), rows])

    def step_operands(self, slot: jax.Array) -> list[tuple[int, Any, Any]]:
        codes = self.refs.codes_s.at[slot, self.index]
        kinds = self.kinds
        return list(operands(codes, self.refs.x_s.at[slot], kinds.codes, kinds.native))

    def by_row(self, item: _Item, output: jax.Array, done: jax.Array) -> jax.Array:
        """Products with a scale for each of the weight's rows."""
        refs, kind = self.refs, jnp.int32 if self.is_integer else jnp.float32

        def one_step(i, acc):
            slot = lax.rem(done + i, jnp.int32(self.config.stages))
            plgpu.barrier_wait(refs.loaded.at[slot])
            pairs = [(a, b) for _, a, b in self.step_operands(slot)]
            acc = multiply(pairs, acc, kind, self.interpret)
            plgpu.barrier_arrive(refs.freed.at[slot])
            return acc

        shape = (ROWS, self.config.columns)
        nothing = plgpu.layout_cast(jnp.zeros(shape, kind), tiles.LAYOUT)
        acc = lax.fori_loop(0, item.num_steps, one_step, nothing)
        scales = tiles.load_plain(refs.scales.at[pl.ds(output, ROWS)], tiles.ROW_LAYOUT)
        return acc.astype(jnp.float32) * over_columns(scales.astype(jnp.float32), shape)

    def by_groups(
        self, item: _Item, output: jax.Array, done: jax.Array, kept: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Products with scales, and what is added, for each of the weight's rows and groups of the contracted axis.

        Args:
            kept: how many times scales were kept. They go to two places in turn, so that no thread still reads those that
                another one writes over.
        """
        refs, kinds, unit = self.refs, self.kinds, self.kinds.unit
        num_groups = refs.scales.shape[1]
        first_unit = lax.div(item.first_step, jnp.int32(unit))

        def first_group(index: jax.Array) -> jax.Array:
            """Of those that are read for a unit: the last ones may be fewer, and some are read again."""
            return jnp.minimum((first_unit + index) * GROUPS, num_groups - GROUPS)

        def one_unit(index, carry):
            acc, ahead = carry
            place = (kept + index) & 1
            self.keep(place, ahead)
            plgpu.commit_smem()
            ahead = self.read(output, first_group(index + 1))
            start = index * unit
            before = (first_unit + index) * GROUPS - first_group(index)

            def one_step(i, acc):
                slot = lax.rem(done + start + i, jnp.int32(self.config.stages))
                plgpu.barrier_wait(refs.loaded.at[slot])
                steps = self.step_operands(slot)
                for group in range(kinds.groups_per_step):
                    size = kinds.group_size
                    pairs = [(a, b) for k, a, b in steps if k // size == group]
                    of_group = before + i * kinds.groups_per_step + group
                    where = (self.index, place, of_group)
                    factors = self.factors(where, slot, group, acc.shape)
                    product = multiply(pairs, None, jnp.float32, self.interpret)
                    acc = added(acc, product, *factors)
                plgpu.barrier_arrive(refs.freed.at[slot])
                return acc

            steps = jnp.minimum(unit, item.num_steps - start)
            return lax.fori_loop(0, steps, one_step, acc), ahead

        shape = (ROWS, self.config.columns)
        nothing = plgpu.layout_cast(jnp.zeros(shape, jnp.float32), tiles.LAYOUT)
        units = lax.div(item.num_steps + (unit - 1), jnp.int32(unit))
        begin = nothing, self.read(output, first_group(jnp.int32(0)))
        acc, _ = lax.fori_loop(0, units, one_unit, begin)
        return acc, kept + units

    def read(self, output: jax.Array, first_group: jax.Array) -> list[tuple[jax.Array, ...]]:
        """Scales, zeros and minima of each of `GROUPS` groups [64], out of global memory."""
        refs = [getattr(self.refs, name) for name in self.names]
        return [
            tuple(
                tiles.load_plain(ref.at[pl.ds(output, ROWS), first_group + i], tiles.ROW_LAYOUT)
                for ref in refs
            )
            for i in range(GROUPS)
        ]

    def keep(self, place: jax.Array, ahead: list[tuple[jax.Array, ...]]) -> None:
        """Puts them where every thread can read those of its rows, ready for sums of products."""
        # Nibbles come less 8.
        middle = 8.0 if self.kinds.codes == "uint4" else 0.0
        for i, arrays in enumerate(ahead):
            found = {n: x.astype(jnp.float32) for n, x in zip(self.names, arrays, strict=True)}
            scales, zeros = found["scales"], found.get("zeros", float(self.zero))
            tiles.store_plain(self.refs.scales_s.at[self.index, place, i], scales * self.scale)
            if self.kinds.offsets:
                offsets = scales * (middle - zeros)
                if "minima" in found:
                    offsets = offsets + found["minima"]
                tiles.store_plain(self.refs.offsets_s.at[self.index, place, i], offsets)

    def factors(
        self, place: Any, slot: jax.Array, group: int, shape: tuple[int, ...]
    ) -> tuple[jax.Array, jax.Array | None]:
        """What a group's sums of products [64, columns] are multiplied by, and what is added to them then.

        Read before the products, after which the slot is given back.
        """
        refs = self.refs

        def of_rows(ref: Any) -> jax.Array:
            return over_columns(tiles.load_plain(ref.at[place], tiles.ROW_LAYOUT), shape)

        scales = of_rows(refs.scales_s)
        if not self.kinds.sums:
            return scales, None
        of_x = tiles.load_plain(refs.sums_s.at[slot, group], tiles.COLUMN_LAYOUT)
        of_x = col.over_rows(of_x, shape)
        if self.kinds.native:
            return scales * of_x, None
        return scales, of_rows(refs.offsets_s) * of_x
