"""Attention of requests with many tokens each on Hopper.

A thread block works on a tile of consecutive query tokens of one request and the query heads of one kv head: a producer
warp group keeps a ring of key and value blocks filled by TMA copies, page by page, and consumer warp groups with 64
query rows each share what it brings. Only blocks that some token of the tile may see are loaded, and only those on the
edge of what all of them see are masked.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels_pallas.ragged_paged_attention import mosaic_gpu_tiles as tiles
from kernels_pallas.ragged_paged_attention.mosaic_gpu_config import PrefillConfig
from kernels_pallas.ragged_paged_attention.mosaic_gpu_plan import max_prefill_items, plan_prefill
from kernels_pallas.ragged_paged_attention.mosaic_gpu_tiles import ROWS

# With three warp groups a thread starts with 168 registers; with two it has 255 to begin with.
_CONSUMER_REGISTERS, _PRODUCER_REGISTERS = 232, 40


def heads_per_tile(group: int) -> int:
    """Query heads of a kv head that share a tile: a divisor of the group, at most 8, the rows of the smallest copy."""
    return next(n for n in range(min(group, 8), 0, -1) if group % n == 0)


def tokens_per_consumer(heads: int) -> int:
    """Query tokens of 64 rows: a power of two, at least the 8 rows of the smallest copy."""
    return 1 << (ROWS // heads).bit_length() - 1


def prefill_attention(
    q_tnh: jax.Array,
    kv_pages: tuple[jax.Array, jax.Array],
    block_tables: jax.Array,
    seq_lens: jax.Array,
    query_start_loc: jax.Array,
    query_lens: jax.Array,
    *,
    scale: float,
    sliding_window: int | None,
    soft_cap: float | None,
    config: PrefillConfig,
    interpret: Any = None,
) -> jax.Array:
    """q [T, N, H] -> [T, N, H]; rows of requests with query_lens 0 and rows of no request are not written.

    query_lens [R] is query_start_loc's differences, or 0 for requests that are left out.
    """
    k_pages, v_pages = kv_pages
    _, num_kv_heads, page_size, head_size = k_pages.shape
    num_tokens, num_heads, _ = q_tnh.shape
    config.check(head_size, q_tnh.dtype.itemsize)
    heads = heads_per_tile(num_heads // num_kv_heads)
    tile = tokens_per_consumer(heads) * config.consumers
    max_items = max_prefill_items(num_tokens, block_tables.shape[0], tile)
    items = plan_prefill(query_lens, query_start_loc, seq_lens, tile, max_items)
    body = functools.partial(
        _prefill_tile,
        heads=heads,
        page_size=page_size,
        num_kv_heads=num_kv_heads,
        scale=scale,
        sliding_window=sliding_window,
        soft_cap=soft_cap,
        config=config,
        interpret=interpret,
    )
    block, stages, consumers = config.block_tokens, config.stages, config.consumers
    copies = block // tiles.tokens_per_copy(page_size, head_size)
    dtype = q_tnh.dtype
    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct(q_tnh.shape, dtype),
        grid=(max_items, num_heads // heads),
        grid_names=("item", "heads"),
        num_threads=consumers + 1,
        thread_name="warp_group",
        scratch_types=[
            tiles.swizzled((consumers, ROWS, head_size), dtype),
            plgpu.SMEM((consumers, ROWS, head_size), dtype),
            tiles.swizzled((stages, block, head_size), dtype),
            tiles.swizzled((stages, block, head_size), dtype),
            plgpu.Barrier(num_arrivals=heads, num_barriers=consumers),
            plgpu.Barrier(num_arrivals=copies, num_barriers=stages),
            plgpu.Barrier(num_arrivals=copies, num_barriers=stages),
            plgpu.Barrier(num_arrivals=consumers, num_barriers=stages),
            plgpu.Barrier(num_arrivals=consumers, num_barriers=stages),
            plgpu.Barrier(),
        ],
        compiler_params=tiles.COMPILER_PARAMS,
        kernel_name="paged_prefill",
        **({"interpret": interpret} if interpret else {}),
    )(
        q_tnh,
        tiles.slabs(k_pages),
        tiles.slabs(v_pages),
        block_tables,
        seq_lens,
        items,
    )


def _prefill_tile(
    q_ref, k_ref, v_ref, tables_ref, lens_ref, items_ref, o_ref,
    q_s, o_s, k_s, v_s, q_barrier, k_full, v_full, k_free, v_free, cleared,
    *, heads, page_size, num_kv_heads, scale, sliding_window, soft_cap, config, interpret,
):  # fmt: skip
    item, head_tile = lax.axis_index("item"), lax.axis_index("heads")
    warp_group = lax.axis_index("warp_group")
    row, first_token, num_tokens, position = (items_ref[item, i] for i in range(4))
    block, stages, consumers = config.block_tokens, config.stages, config.consumers
    tiles_per_kv_head = q_ref.shape[1] // heads // num_kv_heads
    kv_head = lax.div(head_tile, jnp.int32(tiles_per_kv_head))
    first_head = head_tile * heads
    share = tokens_per_consumer(heads)

    seq_len = lens_ref[row]
    end = position + num_tokens
    seen_from = jnp.int32(0)
    if sliding_window is not None:
        seen_from = jnp.maximum(position - sliding_window + 1, 0)
    first_block = lax.div(seen_from, jnp.int32(block))
    num_blocks = lax.div(end + (block - 1), jnp.int32(block)) - first_block

    def produce():
        if consumers == 2:
            plgpu.set_max_registers(_PRODUCER_REGISTERS, action="decrease")
        first_page = lax.div(seen_from, jnp.int32(page_size))
        last_page = lax.div(end - 1, jnp.int32(page_size))

        @pl.loop(0, num_blocks)
        def _(i):
            slot = lax.rem(i, jnp.int32(stages))
            for pages_ref, ring, full, free in (
                (k_ref, k_s, k_full, k_free),
                (v_ref, v_s, v_full, v_free),
            ):
                pl.when(i >= stages)(lambda free=free: plgpu.barrier_wait(free.at[slot]))
                tiles.copy_block(
                    pages_ref, ring.at[slot], full.at[slot], tables_ref, row, kv_head,
                    first_block + i, first_page, last_page, page_size, num_kv_heads,
                )  # fmt: skip

    def consume():
        if consumers == 2:
            plgpu.set_max_registers(_CONSUMER_REGISTERS, action="increase")
        q_tile, o_tile = q_s.at[warp_group], o_s.at[warp_group]
        # Row head * share + token of the tile.
        skipped = warp_group * share
        for head in range(heads):
            plgpu.copy_gmem_to_smem(
                q_ref.at[pl.ds(first_token + skipped, share), first_head + head],
                o_tile.at[pl.ds(head * share, share)],
                q_barrier.at[warp_group],
            )
        own_position = position + skipped
        plgpu.barrier_wait(q_barrier.at[warp_group])
        # A copy can't bring rows into wgmma's tiles of 8 unless they start at a multiple of 8.
        columns = tiles.tile_columns(q_s.shape[2])
        for start in range(0, q_s.shape[2], columns):
            part = (slice(None), pl.ds(start, columns))
            q_tile[part] = tiles.load_plain(o_tile.at[part], tiles.LAYOUT)
        plgpu.commit_smem()

        def mask(scores, start):
            row = plgpu.broadcasted_iota(jnp.int32, scores.shape, 0, layout=tiles.LAYOUT)
            column = plgpu.broadcasted_iota(jnp.int32, scores.shape, 1, layout=tiles.LAYOUT)
            # How far back the key is from the query.
            distance = (own_position - start) + (row & (share - 1)) - column
            seen = distance >= 0
            if sliding_window is not None:
                seen &= distance < sliding_window
            return jnp.where(seen, scores, tiles.MASKED)

        def step(i, carry):
            acc, peak, total = carry
            slot = lax.rem(i, jnp.int32(stages))
            start = (first_block + i) * block
            is_refilled = i + stages < num_blocks
            plgpu.barrier_wait(k_full.at[slot])
            scores = tiles.matmul(q_tile, k_s.at[slot].transpose((1, 0)), None, interpret)
            pl.when(is_refilled)(lambda: plgpu.barrier_arrive(k_free.at[slot]))
            scores = tiles.scale_scores(scores, scale, soft_cap)
            on_edge = start - own_position > 1 - block
            if sliding_window is not None:
                on_edge |= start - own_position <= share - 1 - sliding_window
            scores = lax.cond(on_edge, lambda s: mask(s, start), lambda s: s, scores)
            weights, acc, peak, total = tiles.softmax_step(scores, acc, peak, total)
            plgpu.barrier_wait(v_full.at[slot])

            @pl.when(start + block > seq_len)
            def _():
                @pl.when(warp_group == 0)
                def _():
                    tiles.clear_unused(v_s.at[slot], seq_len - start)
                    plgpu.barrier_arrive(cleared)

                plgpu.barrier_wait(cleared)

            acc = tiles.matmul(weights.astype(v_s.dtype), v_s.at[slot], acc, interpret)
            pl.when(is_refilled)(lambda: plgpu.barrier_arrive(v_free.at[slot]))
            return acc, peak, total

        begin = (tiles.zeros((ROWS, q_s.shape[2])), tiles.no_peaks(), tiles.zeros((ROWS,)))
        acc, _, total = lax.fori_loop(0, num_blocks, step, begin)
        tiles.store_plain(o_tile, tiles.normalized(acc, total).astype(o_s.dtype))
        plgpu.commit_smem()
        own_tokens = jnp.clip(num_tokens - skipped, 0, share)
        own_first = first_token + skipped

        @pl.when(own_tokens == share)
        def _():
            for head in range(heads):
                plgpu.copy_smem_to_gmem(
                    o_tile.at[pl.ds(head * share, share)],
                    o_ref.at[pl.ds(own_first, share), first_head + head],
                )

        # What follows a request's last token belongs to the next one.
        @pl.when(own_tokens < share)
        def _():
            @pl.loop(0, own_tokens)
            def _(token):
                for head in range(heads):
                    plgpu.copy_smem_to_gmem(
                        o_tile.at[pl.ds(head * share + token, 1)],
                        o_ref.at[pl.ds(own_first + token, 1), first_head + head],
                    )

        plgpu.wait_smem_to_gmem(0)

    @pl.when(num_tokens > 0)
    def _():
        pl.when(warp_group < consumers)(consume)
        pl.when(warp_group == consumers)(produce)
