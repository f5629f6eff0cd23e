"""The warp group of the prefill kernel that loads: queries, and blocks of keys and values page by page.

It runs ahead of the consumers, into their next tile. An 8-bit cache comes through a ring of its own, from which this warp
group widens block after block into the tiles that the consumers read.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels_pallas.ragged_paged_attention.mosaic_gpu import dequant, tiles
from kernels_pallas.ragged_paged_attention.mosaic_gpu.merge import Merger
from kernels_pallas.ragged_paged_attention.mosaic_gpu.prefill_work import Problem, Tile, Turns


def produce(refs: SimpleNamespace, problem: Problem) -> None:
    turns = Turns(refs, problem)
    stages = problem.config.stages

    def turn_step(turn, filled):
        tile = turns.tile(turn)
        pl.when(turn > 0)(lambda: plgpu.barrier_wait(refs.q_free))
        copy_queries(refs, problem, tile)
        source = source_of(tile, problem.page_size)

        @pl.loop(0, tile.num_blocks)
        def _(i):
            slot = lax.rem(filled + i, jnp.int32(stages))
            for pages, ring, full, free in (
                (refs.k_pages, refs.k_ring, refs.k_full, refs.k_free),
                (refs.v_pages, refs.v_ring, refs.v_full, refs.v_free),
            ):
                pl.when(filled + i >= stages)(lambda free=free: plgpu.barrier_wait(free.at[slot]))
                copy_from(pages, ring.at[slot], full.at[slot], refs, problem, source, i)

        return filled + tile.num_blocks

    filled = lax.fori_loop(0, turns.count, turn_step, jnp.int32(0))
    pl.when(turns.count > 0)(lambda: plgpu.barrier_wait(refs.q_free))
    merge_decoded(refs, problem)

    # Whoever waits on a barrier sees all its phases.
    @pl.loop(0, jnp.minimum(filled, stages))
    def _(slot):
        plgpu.barrier_wait(refs.k_free.at[slot])
        plgpu.barrier_wait(refs.v_free.at[slot])


def produce_narrow(refs: SimpleNamespace, problem: Problem) -> None:
    """Of an 8-bit cache: blocks are on their way in a ring that only this warp group sees, and those that have come
    are widened into a tile for keys and one for values."""
    turns = Turns(refs, problem)
    pl.when(turns.count > 0)(lambda: _produce_narrow(refs, problem, turns))
    merge_decoded(refs, problem)

    @pl.when(turns.count > 0)
    def _():
        plgpu.barrier_wait(refs.k_free.at[0])
        plgpu.barrier_wait(refs.v_free.at[0])


def _produce_narrow(refs: SimpleNamespace, problem: Problem, turns: Turns) -> None:
    block, stages = problem.config.block_tokens, problem.config.stages
    columns = tiles.tile_columns(refs.k_narrow.shape[2])

    def load(turn):
        return source_of(turns.tile(turn), problem.page_size)

    def issue(n, cursor):
        """Start block n, which is block i of turn `turn`."""
        turn, i, source = cursor
        slot = lax.rem(n, jnp.int32(stages))

        @pl.when(turn < turns.count)
        def _():
            for pages, ring in ((refs.k_pages, refs.k_narrow), (refs.v_pages, refs.v_narrow)):
                copy_from(pages, ring.at[slot], refs.narrow_full.at[slot], refs, problem, source, i)

        is_last = i + 1 >= source.num_blocks
        source = lax.cond(
            is_last & (turn + 1 < turns.count), lambda: load(turn + 1), lambda: source
        )
        return turn + is_last.astype(jnp.int32), jnp.where(is_last, 0, i + 1), source

    def turn_step(turn, carry):
        tile = turns.tile(turn)

        def block_step(i, carry):
            n, cursor = carry
            slot = lax.rem(n, jnp.int32(stages))
            plgpu.barrier_wait(refs.narrow_full.at[slot])
            pl.when(n > 0)(lambda: plgpu.barrier_wait(refs.k_free.at[0]))
            dequant.widen(refs.k_narrow.at[slot], refs.k_ring.at[0], columns=columns)
            plgpu.barrier_arrive(refs.k_full.at[0])
            pl.when(n > 0)(lambda: plgpu.barrier_wait(refs.v_free.at[0]))
            used_to = tile.seq_len - (tile.begin + i * block)
            values = (refs.v_narrow.at[slot], refs.v_ring.at[0])

            @pl.when(used_to >= block)
            def _():
                dequant.widen(*values, columns=columns)

            @pl.when(used_to < block)
            def _():
                dequant.widen(*values, used_to, columns=columns)

            plgpu.barrier_arrive(refs.v_full.at[0])
            cursor = issue(n + stages, cursor)

            # The consumers give up the queries as they begin a tile, or as they end it.
            coming = turn + 1 if problem.config.own_result_tile else turn

            @pl.when((i == 0) & (coming > 0) & (coming < turns.count))
            def _():
                plgpu.barrier_wait(refs.q_free)
                copy_queries(refs, problem, turns.tile(coming))

            return n + 1, cursor

        return lax.fori_loop(0, tile.num_blocks, block_step, carry)

    first = turns.tile(jnp.int32(0))
    copy_queries(refs, problem, first)
    cursor = (jnp.int32(0), jnp.int32(0), source_of(first, problem.page_size))
    cursor = lax.fori_loop(0, stages, issue, cursor)
    lax.fori_loop(0, turns.count, turn_step, (jnp.int32(0), cursor))
    plgpu.barrier_wait(refs.q_free)


def merge_decoded(refs: SimpleNamespace, problem: Problem) -> None:
    """Complete the requests that the decode kernel cut, while the consumers are at their last tile. They have given up
    the queries' place, which the results leave through."""
    if problem.decoded is None:
        return
    names = {"out": "out", "lse": "token_lse", "sinks": "sinks"}
    names |= {name: name for name in ("rows", "walks", "parts", "part_lse")}
    given = {name: getattr(refs, ref) for name, ref in names.items() if hasattr(refs, ref)}
    # Beside 8-bit pages more would spill.
    columns, registers = (8, 8) if problem.narrow else (16, 32)
    lse_s = refs.lse_rows.at[problem.config.consumers] if hasattr(refs, "lse_rows") else None
    merger = Merger(
        SimpleNamespace(**given), problem.decoded, refs.q_rows.at[0], lse_s,
        columns=columns, registers=registers, interpret=problem.interpret,
    )  # fmt: skip
    core, num_walks = lax.axis_index("core"), refs.walks.shape[0]

    @pl.loop(0, lax.div(num_walks + (problem.cores - 1) - core, jnp.int32(problem.cores)))
    def _(i):
        merger.merge(core + i * problem.cores)

    plgpu.wait_smem_to_gmem(0)


def copy_queries(refs: SimpleNamespace, problem: Problem, tile: Tile) -> None:
    """Row head * share + token of each consumer's tile."""
    share = problem.share
    for consumer in range(problem.config.consumers):
        for head in range(problem.heads):
            plgpu.copy_gmem_to_smem(
                refs.q.at[
                    pl.ds(tile.first_token + consumer * share, share), tile.first_head + head
                ],
                refs.q_rows.at[consumer, pl.ds(head * share, share)],
                refs.q_full,
            )


class Source(NamedTuple):
    """Where a tile's blocks come from. Scalars."""

    row: jax.Array
    kv_head: jax.Array
    begin: jax.Array
    num_blocks: jax.Array
    last_page: jax.Array


def source_of(tile: Tile, page_size: int) -> Source:
    return Source(
        tile.row,
        tile.kv_head,
        tile.begin,
        tile.num_blocks,
        last_page=lax.div(tile.end - 1, jnp.int32(page_size)),
    )


def copy_from(
    pages: Any, tile_ref: Any, barrier: Any, refs: SimpleNamespace, problem: Problem, source: Source, i: jax.Array,
) -> None:  # fmt: skip
    tiles.copy_block(
        pages, tile_ref, barrier, refs.tables, source.row, source.kv_head,
        source.begin + i * problem.config.block_tokens, source.last_page,
        problem.page_size, problem.num_kv_heads,
    )  # fmt: skip
