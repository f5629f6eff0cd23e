"""The warp groups of the prefill kernel that compute, each on 64 query rows of a tile.

The scores of a block are turned into weights while those of the block before are multiplied with their values, and results
leave by TMA while the next tile is worked on.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels_pallas.ragged_paged_attention.mosaic_gpu import dequant, tiles
from kernels_pallas.ragged_paged_attention.mosaic_gpu.prefill_work import Problem, Tile, Turns
from kernels_pallas.ragged_paged_attention.mosaic_gpu.tiles import ROWS


def consume(refs: SimpleNamespace, problem: Problem, consumer: jax.Array) -> None:
    turns = Turns(refs, problem)

    def turn_step(turn, used, consumer=consumer):
        # LLVM would compute all addresses in the consumer's tiles before the loop over turns, and keep them in
        # registers.
        turn, consumer = lax.optimization_barrier((turn, consumer))
        tile = turns.tile(turn)
        plgpu.barrier_wait(refs.q_full)
        queries = take_queries(refs, problem, tile, consumer)
        if problem.config.own_result_tile:
            plgpu.barrier_arrive(refs.q_free)
        acc, peak, total = attend(refs, problem, tile, queries, used, consumer)
        # Read again: kept, its numbers would take registers from the loop.
        write_result(refs, problem, turns.tile(turn), acc, peak, total, consumer)
        if not problem.config.own_result_tile:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            plgpu.barrier_arrive(refs.q_free)
        return used + tile.num_blocks

    lax.fori_loop(0, turns.count, turn_step, jnp.int32(0))
    plgpu.wait_smem_to_gmem(0)


def take_queries(refs: SimpleNamespace, problem: Problem, tile: Tile, consumer: jax.Array) -> Any:
    """Operand of the matmul, in registers or in tiles. A copy can't write tiles: it would have to start at a token
    that is a multiple of 8."""
    rows = refs.q_rows.at[consumer]

    def take(part):
        queries = tiles.load_plain(part, tiles.LAYOUT)
        if not problem.narrow:
            return queries
        return dequant.to_compute(queries, problem.dtype, refs.scales[0, tile.kv_head])

    if problem.config.queries_in_registers:
        queries = take(rows)
    else:
        queries = refs.q_tiles.at[consumer]
        columns = tiles.tile_columns(rows.shape[1])
        for start in range(0, rows.shape[1], columns):
            part = (slice(None), pl.ds(start, columns))
            queries[part] = take(rows.at[part])
    # Also for the copy of the next queries into `rows`.
    plgpu.commit_smem()
    return queries


def attend(
    refs: SimpleNamespace, problem: Problem, tile: Tile, queries: Any, used: jax.Array, consumer: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:  # fmt: skip
    """(acc [64, H], peak [64], total [64]) of the tile; `used` blocks of the ring came before it."""
    config, share, window = problem.config, problem.share, problem.sliding_window
    block, slots = config.block_tokens, refs.k_ring.shape[0]
    own_position = tile.position + consumer * share
    factor = problem.scale * tiles.LOG2_E if problem.soft_cap is None else 1.0

    def slot(i):
        return lax.rem(used + i, jnp.int32(slots))

    def masked(scores, i):
        start = tile.begin + i * block
        # From memory: LLVM keeps what it can compute from the thread's index in registers, through all loops.
        columns = tiles.load_plain(refs.columns.at[pl.ds(0, block)], tiles.COLUMN_LAYOUT)
        columns = lax.broadcast_in_dim(columns, scores.shape, [1])
        if not problem.causal:
            return jnp.where(columns < tile.seq_len - start, scores, -jnp.inf)
        row = plgpu.broadcasted_iota(jnp.int32, (ROWS,), 0, layout=tiles.ROW_LAYOUT)
        last = lax.broadcast_in_dim((own_position - start) + (row & (share - 1)), scores.shape, [0])
        seen = columns <= last
        if window is not None:
            seen &= columns > last - window
        return jnp.where(seen, scores, -jnp.inf)

    def softmax(scores, i, here, peak, total, on_edge):
        plgpu.barrier_arrive(refs.k_free.at[here])
        if problem.soft_cap is not None:
            scores = tiles.scale_scores(scores, problem.scale, problem.soft_cap)
        if on_edge:
            scores = masked(scores, i)
        weights, *rows = tiles.softmax_block(scores, factor, peak, total)
        return weights, tuple(rows)

    def step(i, carry, on_edge):
        acc, weights, peak, total = carry
        # Behind the barrier, so that LLVM doesn't keep wgmma's descriptors of tiles that stay in place, two registers
        # each, but makes them anew.
        i, here, before, own = lax.optimization_barrier((i, slot(i), slot(i - 1), consumer))
        plgpu.barrier_wait(refs.k_full.at[here])
        weights, (fade, peak, total), acc = tiles.matmul_beside(
            queries if config.queries_in_registers else refs.q_tiles.at[own],
            refs.k_ring.at[here], weights, refs.v_ring.at[before], acc,
            before_values=lambda: plgpu.barrier_wait(refs.v_full.at[before]),
            softmax=lambda scores: softmax(scores, i, here, peak, total, on_edge),
            interpret=problem.interpret,
        )  # fmt: skip
        plgpu.barrier_arrive(refs.v_free.at[before])
        return tiles.faded(acc, fade), weights, peak, total

    last = tile.num_blocks - 1
    plgpu.barrier_wait(refs.k_full.at[slot(0)])
    keys = refs.k_ring.at[slot(0)].transpose((1, 0))
    scores = tiles.matmul(queries, keys, None, problem.interpret)
    peak, total = first_peak(refs, problem, tile)
    weights, (_, peak, total) = softmax(scores, jnp.int32(0), slot(0), peak, total, on_edge=True)
    acc = tiles.zeros((ROWS, refs.q_rows.shape[2]))
    carry = (acc, weights.astype(problem.dtype), peak, total)

    # Blocks that all tokens see whole: those in between need no mask.
    whole_until = own_position + 1 if problem.causal else tile.seq_len
    edge = jnp.clip(lax.div(whole_until - tile.begin, jnp.int32(block)), 1, tile.num_blocks)
    begin = jnp.int32(1)
    if window is not None:
        seen_by_all = jnp.maximum(own_position + share - window, 0)
        whole_from = lax.div(seen_by_all - tile.begin + (block - 1), jnp.int32(block))
        begin = jnp.clip(whole_from, 1, edge)
        carry = lax.fori_loop(1, begin, lambda i, c: step(i, c, True), carry)
    carry = lax.fori_loop(begin, edge, lambda i, c: step(i, c, False), carry)
    carry = lax.fori_loop(edge, tile.num_blocks, lambda i, c: step(i, c, True), carry)

    acc, weights, peak, total = carry
    plgpu.barrier_wait(refs.v_full.at[slot(last)])
    if not problem.narrow:
        start = tile.begin + last * block

        @pl.when(start + block > tile.seq_len)
        def _():
            @pl.when(consumer == 0)
            def _():
                tiles.clear_unused(refs.v_ring.at[slot(last)], tile.seq_len - start)
                plgpu.barrier_arrive(refs.cleared)

            plgpu.barrier_wait(refs.cleared)

    acc = tiles.matmul(weights, refs.v_ring.at[slot(last)], acc, problem.interpret)
    plgpu.barrier_arrive(refs.v_free.at[slot(last)])
    return acc, peak, total


def first_peak(refs: SimpleNamespace, problem: Problem, tile: Tile) -> tuple[jax.Array, jax.Array]:
    """Running maximum and sum before the first key: a sink is a score without a value."""
    peak, total = tiles.no_peaks(), tiles.zeros((ROWS,))
    if not hasattr(refs, "sinks"):
        return peak, total
    row = plgpu.broadcasted_iota(jnp.int32, (ROWS,), 0, layout=tiles.ROW_LAYOUT)
    head_of_row = lax.shift_right_logical(row, jnp.int32(problem.share.bit_length() - 1))
    for head in range(problem.heads):
        sink = jnp.maximum(refs.sinks[tile.first_head + head] * tiles.LOG2_E, tiles.NO_PEAK)
        peak = jnp.where(head_of_row == head, sink, peak)
    return peak, jnp.where(peak > tiles.NO_PEAK, 1.0, total)


def write_result(
    refs: SimpleNamespace, problem: Problem, tile: Tile,
    acc: jax.Array, peak: jax.Array, total: jax.Array, consumer: jax.Array,
) -> None:  # fmt: skip
    share = problem.share
    out = tiles.normalized(acc, total)
    if problem.narrow:
        out = out * refs.scales[1, tile.kv_head]
    # What the tile before left here has been read.
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    o_tile = (refs.o_rows if problem.config.own_result_tile else refs.q_rows).at[consumer]
    tiles.store_plain(o_tile, out.astype(o_tile.dtype))
    if hasattr(refs, "lse"):
        refs.lse_rows.at[consumer][...] = (peak + jnp.log2(total)) * (1 / tiles.LOG2_E)
    plgpu.commit_smem()
    if hasattr(refs, "lse"):
        plgpu.copy_smem_to_gmem(
            refs.lse_rows.at[consumer], refs.lse.at[tile.item, tile.head_tile, consumer]
        )
    skipped = consumer * share
    own_tokens = jnp.clip(tile.num_tokens - skipped, 0, share)
    own_first = tile.first_token + skipped

    @pl.when(own_tokens == share)
    def _():
        for head in range(problem.heads):
            plgpu.copy_smem_to_gmem(
                o_tile.at[pl.ds(head * share, share)],
                refs.out.at[pl.ds(own_first, share), tile.first_head + head],
            )

    # What follows a request's last token belongs to the next one.
    @pl.when(own_tokens < share)
    def _():
        @pl.loop(0, own_tokens)
        def _(token):
            for head in range(problem.heads):
                plgpu.copy_smem_to_gmem(
                    o_tile.at[pl.ds(head * share + token, 1)],
                    refs.out.at[pl.ds(own_first + token, 1), tile.first_head + head],
                )
