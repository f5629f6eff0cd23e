"""What a thread block of the prefill kernel does: a producer and consumer warp groups, item after item.

The producer keeps a ring of key and value blocks filled and has the next item's queries and first blocks on their way
while the consumers finish the current one. A consumer computes the scores of a block while the previous block's weights
are multiplied with its values, and leaves its result to TMA.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels_pallas.ragged_paged_attention import mosaic_gpu_dequant as dequant
from kernels_pallas.ragged_paged_attention import mosaic_gpu_tiles as tiles
from kernels_pallas.ragged_paged_attention.mosaic_gpu_config import PrefillConfig
from kernels_pallas.ragged_paged_attention.mosaic_gpu_tiles import ROWS


@dataclass(frozen=True, slots=True)
class Problem:
    """What is known when the kernel is compiled."""

    config: PrefillConfig
    cores: int
    """Thread blocks in the grid."""
    num_heads: int
    num_kv_heads: int
    heads: int
    """Query heads of a tile."""
    share: int
    """Query tokens of a consumer: a power of two."""
    page_size: int
    dtype: Any
    """Of the matmuls' operands."""
    narrow: bool
    """The cache has 8 bits."""
    scale: float
    sliding_window: int | None
    soft_cap: float | None
    causal: bool
    interpret: Any


class Tile(NamedTuple):
    """An item and a head tile. Scalars."""

    item: jax.Array
    head_tile: jax.Array
    row: jax.Array
    first_token: jax.Array
    num_tokens: jax.Array
    position: jax.Array
    """Of the first token in its request."""
    first_head: jax.Array
    kv_head: jax.Array
    seq_len: jax.Array
    seen_from: jax.Array
    """The first position that some token sees."""
    end: jax.Array
    """One past the last position that some token sees."""
    first_block: jax.Array
    num_blocks: jax.Array


class Turns:
    """The tiles of this thread block: one of each run of `cores` tiles, back and forth, as the plan sorts them by cost."""

    def __init__(self, refs: SimpleNamespace, problem: Problem):
        self._refs, self._problem = refs, problem
        self._head_tiles = problem.num_heads // problem.heads
        num_tiles = refs.num_items[0] * self._head_tiles
        cores = jnp.int32(problem.cores)
        whole = lax.div(num_tiles, cores)
        self.count = whole + (self._place(whole) < lax.rem(num_tiles, cores)).astype(jnp.int32)

    def _place(self, turn: jax.Array) -> jax.Array:
        core = lax.axis_index("core")
        return jnp.where(turn & 1 == 0, core, self._problem.cores - 1 - core)

    def tile(self, turn: jax.Array) -> Tile:
        problem, refs = self._problem, self._refs
        index = turn * problem.cores + self._place(turn)
        item = lax.div(index, jnp.int32(self._head_tiles))
        head_tile = index - item * self._head_tiles
        row, first_token, num_tokens, position = (refs.items[item, i] for i in range(4))
        seq_len = refs.lens[row]
        end = position + num_tokens if problem.causal else seq_len
        seen_from = jnp.int32(0)
        if problem.sliding_window is not None:
            seen_from = jnp.maximum(position - problem.sliding_window + 1, 0)
        block = jnp.int32(problem.config.block_tokens)
        first_block = lax.div(seen_from, block)
        tiles_per_kv_head = self._head_tiles // problem.num_kv_heads
        return Tile(
            item,
            head_tile,
            row,
            first_token,
            num_tokens,
            position,
            first_head=head_tile * problem.heads,
            kv_head=lax.div(head_tile, jnp.int32(tiles_per_kv_head)),
            seq_len=seq_len,
            seen_from=seen_from,
            end=end,
            first_block=first_block,
            num_blocks=lax.div(end + (block - 1), block) - first_block,
        )


def prefill_kernel(*arrays: Any, names: tuple[str, ...], problem: Problem) -> None:
    refs = SimpleNamespace(**dict(zip(names, arrays, strict=True)))
    warp_group = lax.axis_index("warp_group")
    consumers = problem.config.consumers

    producer_registers = 96 if problem.narrow else 40

    @pl.when(warp_group < consumers)
    def _():
        # With two warp groups each thread has 255 registers to begin with.
        if consumers == 2:
            plgpu.set_max_registers(256 - (producer_registers // 16) * 8, action="increase")
        consume(refs, problem, warp_group)

    @pl.when(warp_group == consumers)
    def _():
        if consumers == 2:
            plgpu.set_max_registers(producer_registers, action="decrease")
        (produce_narrow if problem.narrow else produce)(refs, problem)


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

    # Whoever waits on a barrier sees all its phases.
    @pl.loop(0, jnp.minimum(filled, stages))
    def _(slot):
        plgpu.barrier_wait(refs.k_free.at[slot])
        plgpu.barrier_wait(refs.v_free.at[slot])

    pl.when(turns.count > 0)(lambda: plgpu.barrier_wait(refs.q_free))


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
    first_block: jax.Array
    num_blocks: jax.Array
    first_page: jax.Array
    last_page: jax.Array


def source_of(tile: Tile, page_size: int) -> Source:
    return Source(
        tile.row,
        tile.kv_head,
        tile.first_block,
        tile.num_blocks,
        first_page=lax.div(tile.seen_from, jnp.int32(page_size)),
        last_page=lax.div(tile.end - 1, jnp.int32(page_size)),
    )


def copy_from(
    pages: Any, tile_ref: Any, barrier: Any, refs: SimpleNamespace, problem: Problem, source: Source, i: jax.Array,
) -> None:  # fmt: skip
    tiles.copy_block(
        pages, tile_ref, barrier, refs.tables, source.row, source.kv_head,
        source.first_block + i, source.first_page, source.last_page,
        problem.page_size, problem.num_kv_heads,
    )  # fmt: skip


def produce_narrow(refs: SimpleNamespace, problem: Problem) -> None:
    """Of an 8-bit cache: blocks are on their way in a ring that only this warp group sees, and those that have come
    are widened into a tile for keys and one for values."""
    turns = Turns(refs, problem)
    pl.when(turns.count > 0)(lambda: _produce_narrow(refs, problem, turns))


def _produce_narrow(refs: SimpleNamespace, problem: Problem, turns: Turns) -> None:
    block, stages = problem.config.block_tokens, problem.config.stages

    def load(turn):
        return source_of(turns.tile(turn), problem.page_size)

    def issue(n, cursor):
        """Start block n, which is block i of turn `turn`."""
        turn, i, source = cursor
        slot = lax.rem(n, jnp.int32(stages))

        @pl.when(turn < turns.count)
        def _():
            for pages, ring in ((refs.k_pages, refs.k_narrow), (refs.v_pages, refs.v_narrow)):
                copy_from(
                    pages, ring.at[slot], refs.narrow_full.at[slot], refs, problem, source, i
                )

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
            dequant.widen(refs.k_narrow.at[slot], refs.k_ring.at[0])
            plgpu.barrier_arrive(refs.k_full.at[0])
            pl.when(n > 0)(lambda: plgpu.barrier_wait(refs.v_free.at[0]))
            unused = (tile.first_block + i + 1) * block - tile.seq_len

            @pl.when(unused <= 0)
            def _():
                dequant.widen(refs.v_narrow.at[slot], refs.v_ring.at[0])

            @pl.when(unused > 0)
            def _():
                dequant.widen(refs.v_narrow.at[slot], refs.v_ring.at[0], block - unused)

            plgpu.barrier_arrive(refs.v_full.at[0])
            cursor = issue(n + stages, cursor)

            @pl.when((i == 0) & (turn + 1 < turns.count))
            def _():
                plgpu.barrier_wait(refs.q_free)
                copy_queries(refs, problem, turns.tile(turn + 1))

            return n + 1, cursor

        return lax.fori_loop(0, tile.num_blocks, block_step, carry)

    first = turns.tile(jnp.int32(0))
    copy_queries(refs, problem, first)
    cursor = (jnp.int32(0), jnp.int32(0), source_of(first, problem.page_size))
    cursor = lax.fori_loop(0, stages, issue, cursor)
    lax.fori_loop(0, turns.count, turn_step, (jnp.int32(0), cursor))
    for barrier in (refs.k_free.at[0], refs.v_free.at[0], refs.q_free):
        plgpu.barrier_wait(barrier)


def consume(refs: SimpleNamespace, problem: Problem, consumer: jax.Array) -> None:
    turns = Turns(refs, problem)

    def turn_step(turn, used):
        tile = turns.tile(turn)
        plgpu.barrier_wait(refs.q_full)
        queries = take_queries(refs, problem, consumer)
        if problem.config.own_result_tile:
            plgpu.barrier_arrive(refs.q_free)
        acc, peak, total = attend(refs, problem, tile, queries, used, consumer)
        write_result(refs, problem, tile, acc, peak, total, consumer)
        if not problem.config.own_result_tile:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            plgpu.barrier_arrive(refs.q_free)
        return used + tile.num_blocks

    lax.fori_loop(0, turns.count, turn_step, jnp.int32(0))
    plgpu.wait_smem_to_gmem(0)


def take_queries(refs: SimpleNamespace, problem: Problem, consumer: jax.Array) -> Any:
    """Operand of the matmul, in registers or in tiles. A copy can't write tiles: it would have to start at a token
    that is a multiple of 8."""
    rows = refs.q_rows.at[consumer]
    if problem.config.queries_in_registers:
        return dequant.to_compute(tiles.load_plain(rows, tiles.LAYOUT), problem.dtype)
    q_tile = refs.q_tiles.at[consumer]
    columns = tiles.tile_columns(rows.shape[1])
    for start in range(0, rows.shape[1], columns):
        part = (slice(None), pl.ds(start, columns))
        q_tile[part] = dequant.to_compute(
            tiles.load_plain(rows.at[part], tiles.LAYOUT), problem.dtype
        )
    plgpu.commit_smem()
    return q_tile


def attend(
    refs: SimpleNamespace, problem: Problem, tile: Tile, queries: Any, used: jax.Array, consumer: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:  # fmt: skip
    """(acc [64, H], peak [64], total [64]) of the tile; `used` blocks of the ring came before it."""
    config, share, window = problem.config, problem.share, problem.sliding_window
    block, slots = config.block_tokens, refs.k_ring.shape[0]
    own_position = tile.position + consumer * share
    k_scale = refs.scales[0, tile.kv_head] if problem.narrow else None
    factor = tiles.scale_factor(problem.scale, problem.soft_cap, k_scale)

    def slot(i):
        return lax.rem(used + i, jnp.int32(slots))

    def masked(scores, i):
        start = (tile.first_block + i) * block
        column = plgpu.broadcasted_iota(jnp.int32, scores.shape, 1, layout=tiles.LAYOUT)
        if not problem.causal:
            return jnp.where(column < tile.seq_len - start, scores, -jnp.inf)
        row = plgpu.broadcasted_iota(jnp.int32, scores.shape, 0, layout=tiles.LAYOUT)
        # How far back the key is from the query.
        distance = (own_position - start) + (row & (share - 1)) - column
        seen = distance >= 0
        if window is not None:
            seen &= distance < window
        return jnp.where(seen, scores, -jnp.inf)

    def softmax(scores, i, peak, total, on_edge):
        plgpu.barrier_arrive(refs.k_free.at[slot(i)])
        if problem.soft_cap is not None:
            scores = tiles.capped(scores, problem.scale, problem.soft_cap, k_scale)
        if on_edge:
            scores = masked(scores, i)
        weights, *rows = tiles.softmax_block(scores, factor, peak, total)
        return weights, tuple(rows)

    def step(i, carry, on_edge):
        acc, weights, peak, total = carry
        plgpu.barrier_wait(refs.k_full.at[slot(i)])
        weights, (fade, peak, total), acc = tiles.matmul_beside(
            queries, refs.k_ring.at[slot(i)], weights, refs.v_ring.at[slot(i - 1)], acc,
            before_values=lambda: plgpu.barrier_wait(refs.v_full.at[slot(i - 1)]),
            softmax=lambda scores: softmax(scores, i, peak, total, on_edge),
            interpret=problem.interpret,
        )  # fmt: skip
        plgpu.barrier_arrive(refs.v_free.at[slot(i - 1)])
        return tiles.faded(acc, fade), weights, peak, total

    last = tile.num_blocks - 1
    plgpu.barrier_wait(refs.k_full.at[slot(0)])
    keys = refs.k_ring.at[slot(0)].transpose((1, 0))
    scores = tiles.matmul(queries, keys, None, problem.interpret)
    peak, total = first_peak(refs, problem, tile)
    weights, (_, peak, total) = softmax(scores, jnp.int32(0), peak, total, on_edge=True)
    acc = tiles.zeros((ROWS, refs.q_rows.shape[2]))
    carry = (acc, weights.astype(problem.dtype), peak, total)

    # Blocks that all tokens see whole: those in between need no mask.
    whole_until = own_position + 1 if problem.causal else tile.seq_len
    edge = jnp.clip(lax.div(whole_until, jnp.int32(block)) - tile.first_block, 1, tile.num_blocks)
    begin = jnp.int32(1)
    if window is not None:
        seen_by_all = jnp.maximum(own_position + share - window, 0)
        whole_from = lax.div(seen_by_all + (block - 1), jnp.int32(block)) - tile.first_block
        begin = jnp.clip(whole_from, 1, edge)
        carry = lax.fori_loop(1, begin, lambda i, c: step(i, c, True), carry)
    carry = lax.fori_loop(begin, edge, lambda i, c: step(i, c, False), carry)
    carry = lax.fori_loop(edge, tile.num_blocks, lambda i, c: step(i, c, True), carry)

    acc, weights, peak, total = carry
    plgpu.barrier_wait(refs.v_full.at[slot(last)])
    if not problem.narrow:
        start = (tile.first_block + last) * block

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


def first_peak(
    refs: SimpleNamespace, problem: Problem, tile: Tile
) -> tuple[jax.Array, jax.Array]:
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
