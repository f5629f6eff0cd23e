"""The body of the decode kernel: one walk over its items, by a producer and a consumer warp group."""

from __future__ import annotations

import functools
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
from kernels_pallas.ragged_paged_attention.mosaic_gpu.decode_plan import Item, Walk, item_of
from kernels_pallas.ragged_paged_attention.mosaic_gpu.dequant import to_compute, widen

QUERY_STAGES = 2


class DecodeWalk:
    """`refs` are arrays and scratch memory by name, `c` what is known when the kernel is built: see `decode_attention`."""

    def __init__(self, refs: dict[str, Any], c: SimpleNamespace):
        self.r = r = SimpleNamespace(**refs)
        self.c = c
        self.index = lax.axis_index("walk")
        self.walk = Walk(*(r.walks[self.index, i] for i in range(len(Walk._fields))))
        self.writer = TokenWriter(
            r.out, refs.get("lse"), r.out_s, r.lse_s,
            group=c.shape.group, heads=c.shape.heads, interpret=c.interpret,
        )  # fmt: skip
        self.is_narrow = "wide_s" in refs
        self.narrow_columns = tiles.tile_columns(c.shape.head_size)

    def run(self) -> None:
        warp_group = lax.axis_index("warp_group")
        pl.when(warp_group == 0)(self.consume)
        pl.when(warp_group == 1)(self.produce)

    def item(self, index: jax.Array) -> Item:
        return item_of(self.r.rows, self.walk, index)

    def begin(self, item: Item, i: jax.Array) -> jax.Array:
        """Where the item's block i does, in the context."""
        return item.row.begin + (item.first_block + i) * self.c.block

    def first_visible(self, item: Item) -> jax.Array:
        """The position from which on the request's first token sees keys."""
        if self.c.sliding_window is None:
            return jnp.int32(0)
        first = item.row.seq_len - item.row.num_tokens + 1 - self.c.sliding_window
        return jnp.maximum(first, 0)

    def produce(self) -> None:
        """Keep the ring full."""
        r, c, shape = self.r, self.c, self.c.shape
        last_token = jnp.int32(r.q.shape[0] - 1)
        page_size = jnp.int32(c.page_size)

        def load_item(index, position):
            item = self.item(index)
            row = item.row
            stage = index & (QUERY_STAGES - 1)
            pl.when(index >= QUERY_STAGES)(lambda: plgpu.barrier_wait(r.q_free.at[stage]))
            for i in range(shape.tokens):
                plgpu.copy_gmem_to_smem(
                    r.q.at[
                        jnp.minimum(row.first_token + i, last_token),
                        pl.ds(item.head * shape.group, shape.group),
                    ],
                    r.q_in.at[stage, pl.ds(i * shape.heads, shape.group)],
                    r.q_full.at[stage],
                )
            last_page = lax.div(row.seq_len - 1, page_size)
            kv_head = lax.div(item.head, jnp.int32(shape.splits))

            def load_block(i, position):
                for pages_ref in (r.k, r.v):
                    slot = lax.rem(position, jnp.int32(c.slots))
                    pl.when(position >= c.slots)(
                        functools.partial(plgpu.barrier_wait, r.free.at[slot])
                    )
                    tiles.copy_block(
                        pages_ref, r.ring.at[slot], r.full.at[slot], r.tables, row.request,
                        kv_head, self.begin(item, i), last_page, c.page_size, c.num_kv_heads,
                    )  # fmt: skip
                    position = position + 1
                return position

            return lax.fori_loop(0, item.num_blocks, load_block, position)

        position = lax.fori_loop(0, self.walk.count, load_item, jnp.int32(0))
        # What the consumer gave up last is waited for too: no barrier may end with news that nobody heard.
        for num_used, num_places, free in (
            (position, c.slots, r.free),
            (self.walk.count, QUERY_STAGES, r.q_free),
        ):

            @pl.loop(0, jnp.minimum(num_used, num_places))
            def _(place, free=free):
                plgpu.barrier_wait(free.at[place])

    def consume(self) -> None:
        shape = self.c.shape
        # Beside what widening takes, a second loop would spill.
        widths = shape.widths[-1:] if self.is_narrow else shape.widths
        if hasattr(self.r, "num_owned"):
            self.clear_tokens_of_no_request()

        def fold_item(index, position):
            index, position = lax.optimization_barrier((index, position))
            item = self.item(index)
            fits = item.row.num_tokens * shape.heads <= widths[0]
            if len(widths) == 1:
                self.fold(item, index, position, widths[0])
            else:
                pl.when(fits)(lambda: self.fold(item, index, position, widths[0]))
                pl.when(~fits)(lambda: self.fold(item, index, position, widths[1]))
            return position + 2 * item.num_blocks

        lax.fori_loop(0, self.walk.count, fold_item, jnp.int32(0))
        plgpu.wait_smem_to_gmem(0)

    def fold(self, item: Item, index: jax.Array, position: jax.Array, columns: int) -> None:
        """One item, from its queries to its result."""
        r, c, shape = self.r, self.c, self.c.shape
        block, head_size, interpret = c.block, shape.head_size, c.interpret
        parts = parts_of(head_size)
        stage = index & (QUERY_STAGES - 1)
        plgpu.barrier_wait(r.q_full.at[stage])
        for start in parts:
            part = (pl.ds(0, columns), pl.ds(start, ROWS))
            queries = col.load_transposed_plain(r.q_in.at[(stage, *part)], interpret)
            col.store_transposed(r.q_s.at[part], to_compute(queries, r.q_s.dtype), interpret)
        plgpu.commit_smem()
        plgpu.barrier_arrive(r.q_free.at[stage])
        queries_t = r.q_s.at[pl.ds(0, columns)].transpose((1, 0))

        seq_len = item.row.seq_len
        kv_head = lax.div(item.head, jnp.int32(shape.splits))
        scale = c.scale * r.k_scales[kv_head] if hasattr(r, "k_scales") else c.scale
        first_position = seq_len - item.row.num_tokens
        first_visible = self.first_visible(item)

        def mask(scores, start):
            position = start + plgpu.broadcasted_iota(
                jnp.int32, scores.shape, 0, layout=tiles.LAYOUT
            )
            column = plgpu.broadcasted_iota(jnp.int32, scores.shape, 1, layout=tiles.LAYOUT)
            token = lax.div(column + col.unknown_zero(), jnp.full_like(column, shape.heads))
            # How far back the key is from the query.
            distance = first_position + token - position
            seen = distance >= 0 if c.causal else position < seq_len
            if c.sliding_window is not None:
                seen &= distance < c.sliding_window
            return jnp.where(seen, scores, tiles.MASKED)

        def step(i, carry):
            accs, peak, total = carry
            slots = [lax.rem(position + 2 * i + j, jnp.int32(c.slots)) for j in range(2)]
            start = self.begin(item, i)
            keys, values = (r.ring.at[slot] for slot in slots)
            plgpu.barrier_wait(r.full.at[slots[0]])
            if self.is_narrow:
                wide_s = r.wide_s.at[col.unknown_zero()]
                widen(keys, wide_s, columns=self.narrow_columns)
                plgpu.barrier_arrive(r.free.at[slots[0]])
                scores = tiles.matmul(wide_s, queries_t, None, interpret)
            else:
                scores = tiles.matmul(keys, queries_t, None, interpret)
                plgpu.barrier_arrive(r.free.at[slots[0]])
            scores = tiles.scale_scores(scores, scale, c.soft_cap)
            # Some token doesn't see some key of the block.
            on_edge = start + block > (first_position + 1 if c.causal else seq_len)
            if c.sliding_window is not None:
                on_edge |= start < first_visible + item.row.num_tokens - 1
            scores = lax.cond(on_edge, lambda s: mask(s, start), lambda s: s, scores)
            weights, accs, peak, total = col.softmax_step(scores, accs, peak, total)
            weights_s = r.weights_s.at[col.unknown_zero(), pl.ds(0, columns)]
            col.store_transposed(weights_s, weights.astype(weights_s.dtype), interpret)
            plgpu.barrier_wait(r.full.at[slots[1]])
            used_to = seq_len - start
            if self.is_narrow:
                widen(values, wide_s, used_to, columns=self.narrow_columns)
                plgpu.barrier_arrive(r.free.at[slots[1]])
                values = wide_s
            else:
                pl.when(used_to < block)(lambda: tiles.clear_unused(values, used_to))
            plgpu.commit_smem()
            weights_t = weights_s.transpose((1, 0))
            accs = tuple(
                tiles.matmul(
                    values.at[:, pl.ds(part, ROWS)].transpose((1, 0)), weights_t, acc, interpret
                )
                for part, acc in zip(parts, accs, strict=True)
            )
            if not self.is_narrow:
                plgpu.barrier_arrive(r.free.at[slots[1]])
            return accs, peak, total

        begin = (
            tuple(col.zeros((ROWS, columns)) for _ in parts),
            col.no_peaks(columns),
            col.no_totals(block, columns),
        )
        accs, peak, total = lax.fori_loop(0, item.num_blocks, step, begin)
        total = total.sum(axis=0) if total.ndim == 2 else total
        value_scale = r.v_scales[kv_head] if hasattr(r, "v_scales") else None
        # Read again: kept, its numbers would take registers from the loop.
        item = self.item(index)
        is_whole = item.opens & item.closes
        pl.when(is_whole)(lambda: self.write_result(item, accs, peak, total, value_scale))
        pl.when(~is_whole)(lambda: self.write_part(item, accs, peak, total, value_scale))

    def write_result(self, item: Item, accs: Any, peak: Any, total: Any, value_scale: Any) -> None:
        first_head, columns = item.head * self.c.shape.group, peak.shape[0]
        sinks = None
        if hasattr(self.r, "sinks"):
            sinks = col.sinks_of(
                self.r.sinks, first_head, self.c.shape.group, self.c.shape.heads, columns
            )
        factor, lse = col.finish(peak, total, sinks)
        where = (item.row.first_token, first_head, item.row.num_tokens)
        self.writer.stage(_scaled(accs, factor, value_scale))
        self.writer.send(*where)
        self.writer.put_lse(lse)
        self.writer.write_lse(*where)

    def write_part(self, item: Item, accs: Any, peak: Any, total: Any, value_scale: Any) -> None:
        factor, lse = col.finish(peak, total, None)
        part, columns = 2 * self.index + item.opens.astype(jnp.int32), peak.shape[0]
        for start, acc in zip(
            parts_of(self.c.shape.head_size), _scaled(accs, factor, value_scale), strict=True
        ):
            tiles.store_plain(self.r.parts.at[part, pl.ds(start, ROWS), pl.ds(0, columns)], acc)
        tiles.store_plain(self.r.part_lse.at[part, pl.ds(0, columns)], lse)

    def clear_tokens_of_no_request(self) -> None:
        r, shape = self.r, self.c.shape
        num_tokens, num_heads, _ = r.out.shape
        count = num_tokens - r.num_owned[0]
        num_walks = r.walks.shape[0]
        self.writer.stage(
            [col.zeros((ROWS, 8 * -(-shape.group // 8)))] * len(parts_of(shape.head_size))
        )

        @pl.loop(0, lax.div(count + (num_walks - 1) - self.index, jnp.int32(num_walks)))
        def _(i):
            token = r.num_owned[0] + self.index + i * num_walks

            @pl.loop(0, num_heads // shape.group)
            def _(head):
                self.writer.send(token, head * shape.group, jnp.int32(1))

            if "lse" in r.__dict__:

                @pl.loop(0, num_heads)
                def _(head):
                    r.lse[token, head] = jnp.float32(-jnp.inf)


def _scaled(accs: Any, factor: jax.Array, value_scale: Any) -> list[jax.Array]:
    if value_scale is not None:
        factor = factor * value_scale
    return [acc * col.over_rows(factor, acc.shape) for acc in accs]
