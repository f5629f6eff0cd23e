"""Attention of one token per request on Hopper: split over the context, memory-bound.

One warp group works on an item of `plan_decode` for one kv head: it keeps a ring of key and value blocks filled by TMA
copies, page by page, and folds block after block into a running softmax. The query heads of the kv head are the rows of
the matmuls; wgmma takes 64 of them, the rest is idle, as the time goes into loading anyway. A second, small kernel
merges the items of each request.
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
from kernels_pallas.ragged_paged_attention.mosaic_gpu_config import DecodeConfig
from kernels_pallas.ragged_paged_attention.mosaic_gpu_merge import merge_items
from kernels_pallas.ragged_paged_attention.mosaic_gpu_plan import plan_decode
from kernels_pallas.ragged_paged_attention.mosaic_gpu_tiles import ROWS


def decode_attention(
    q_rnh: jax.Array,
    kv_pages: tuple[jax.Array, jax.Array],
    block_tables: jax.Array,
    seq_lens: jax.Array,
    *,
    scale: float,
    sliding_window: int | None,
    soft_cap: float | None,
    config: DecodeConfig,
    interpret: Any = None,
) -> jax.Array:
    """q [R, N, H] -> [R, N, H]; rows with seq_len 0 give zeros."""
    k_pages, v_pages = kv_pages
    _, num_kv_heads, page_size, head_size = k_pages.shape
    num_rows, num_heads, _ = q_rnh.shape
    group = num_heads // num_kv_heads
    config.check(head_size, q_rnh.dtype.itemsize)
    # Tiles in shared memory come in 8 rows.
    padded_group = -(-group // 8) * 8
    q_rkgh = q_rnh.reshape(num_rows, num_kv_heads, group, head_size)
    q_rkgh = jnp.pad(q_rkgh, ((0, 0), (0, 0), (0, padded_group - group), (0, 0)))
    plan = plan_decode(
        seq_lens,
        config.block_tokens,
        sliding_window,
        config.target_items(num_kv_heads),
        config.min_blocks,
    )
    body = functools.partial(
        _decode_item,
        scale=scale,
        sliding_window=sliding_window,
        soft_cap=soft_cap,
        config=config,
        page_size=page_size,
        interpret=interpret,
    )
    num_items = plan.items.shape[0]
    block, stages, dtype = config.block_tokens, config.stages, q_rnh.dtype
    copies = 2 * (block // tiles.tokens_per_copy(page_size, head_size))
    merged_rows = -(-num_kv_heads * padded_group // ROWS) * ROWS
    parts, lse = plgpu.kernel(
        body,
        out_type=(
            jax.ShapeDtypeStruct((num_items, 2, merged_rows, head_size), dtype),
            jax.ShapeDtypeStruct((num_items, merged_rows), jnp.float32),
        ),
        grid=(num_items, num_kv_heads),
        grid_names=("item", "head"),
        scratch_types=[
            tiles.swizzled((stages, block, head_size), dtype),
            tiles.swizzled((stages, block, head_size), dtype),
            plgpu.SMEM((ROWS,), jnp.float32),
            plgpu.Barrier(),
            plgpu.Barrier(num_arrivals=copies, num_barriers=stages),
            *(
                [tiles.swizzled((ROWS, head_size), dtype)]
                if config.keeps_queries(head_size)
                else []
            ),
        ],
        compiler_params=tiles.COMPILER_PARAMS,
        kernel_name="paged_decode",
        **({"interpret": interpret} if interpret else {}),
    )(
        q_rkgh,
        tiles.slabs(k_pages),
        tiles.slabs(v_pages),
        block_tables,
        seq_lens,
        plan.items,
    )
    out_rmh = merge_items(parts, lse, plan.rows, interpret=interpret)
    out_rmh = out_rmh[:, : num_kv_heads * padded_group]
    out_rkgh = out_rmh.reshape(num_rows, num_kv_heads, padded_group, head_size)[:, :, :group]
    return out_rkgh.reshape(q_rnh.shape)


def _decode_item(
    q_ref, k_ref, v_ref, tables_ref, lens_ref, items_ref, parts_ref, lse_ref,
    k_s, v_s, lse_s, q_barrier, kv_barrier, *q_s,
    scale, sliding_window, soft_cap, config, page_size, interpret,
):  # fmt: skip
    item, head = lax.axis_index("item"), lax.axis_index("head")
    row, first_block, num_blocks = items_ref[item, 0], items_ref[item, 1], items_ref[item, 2]
    block, stages = config.block_tokens, config.stages
    num_kv_heads, padded_group = q_ref.shape[1:3]

    @pl.when(num_blocks > 0)
    def _():
        seq_len = lens_ref[row]
        window_start = jnp.int32(0)
        if sliding_window is not None:
            window_start = jnp.maximum(seq_len - sliding_window, 0)
        first_page = lax.div(window_start, jnp.int32(page_size))
        last_page = lax.div(seq_len - 1, jnp.int32(page_size))

        def fetch(i):
            slot = lax.rem(i, jnp.int32(stages))
            for pages_ref, ring in ((k_ref, k_s), (v_ref, v_s)):
                tiles.copy_block(
                    pages_ref, ring.at[slot], kv_barrier.at[slot], tables_ref, row, head,
                    first_block + i, first_page, last_page, page_size, num_kv_heads,
                )  # fmt: skip

        # The queries pass through the last slot of the ring unless they have a place of their own.
        q_tile = q_s[0] if q_s else k_s.at[stages - 1, pl.ds(0, ROWS)]
        plgpu.copy_gmem_to_smem(q_ref.at[row, head], q_tile.at[pl.ds(0, padded_group)], q_barrier)
        for i in range(stages - 1):
            pl.when(i < num_blocks)(functools.partial(fetch, jnp.int32(i)))
        plgpu.barrier_wait(q_barrier)
        queries = q_tile if q_s else plgpu.layout_cast(q_tile[...], tiles.LAYOUT)
        plgpu.commit_smem()
        pl.when(stages - 1 < num_blocks)(lambda: fetch(jnp.int32(stages - 1)))

        def mask(scores, start):
            column = plgpu.broadcasted_iota(jnp.int32, scores.shape, 1, layout=tiles.LAYOUT)
            position = start + column
            seen = position < seq_len
            if sliding_window is not None:
                seen &= position >= window_start
            return jnp.where(seen, scores, tiles.MASKED)

        def step(i, carry):
            acc, peak, total = carry
            slot = lax.rem(i, jnp.int32(stages))
            start = (first_block + i) * block
            plgpu.barrier_wait(kv_barrier.at[slot])
            scores = tiles.matmul(queries, k_s.at[slot].transpose((1, 0)), None, interpret)
            scores = tiles.scale_scores(scores, scale, soft_cap)
            on_edge = start > seq_len - block
            if sliding_window is not None:
                on_edge |= start < window_start
            scores = lax.cond(on_edge, lambda s: mask(s, start), lambda s: s, scores)
            weights, acc, peak, total = tiles.softmax_step(scores, acc, peak, total)
            pl.when(start + block > seq_len)(
                lambda: tiles.clear_unused(v_s.at[slot], seq_len - start)
            )
            acc = tiles.matmul(weights.astype(v_s.dtype), v_s.at[slot], acc, interpret)
            # All warps are done with the slot, and their own writes to it precede the copy's.
            plgpu.commit_smem()
            pl.when(i + stages < num_blocks)(lambda: fetch(i + stages))
            return acc, peak, total

        start = (tiles.zeros((ROWS, k_s.shape[2])), tiles.no_peaks(), tiles.zeros((ROWS,)))
        acc, peak, total = lax.fori_loop(0, num_blocks, step, start)
        out = tiles.normalized(acc, total)
        lse_s[...] = peak + jnp.log2(total)
        # A part goes out as its rounding and the rounding error, through the space of a block that is
        # done with: a float32 tile would cost a stage of the ring.
        out_tile = q_tile if q_s else k_s.at[0, pl.ds(0, ROWS)]
        rounded = out.astype(k_s.dtype)
        rows = pl.ds(head * padded_group, padded_group)
        for part, values in enumerate((rounded, (out - rounded.astype(jnp.float32)))):
            out_tile[...] = values.astype(k_s.dtype)
            plgpu.commit_smem()
            out_rows = out_tile.at[pl.ds(0, padded_group)]
            plgpu.copy_smem_to_gmem(out_rows, parts_ref.at[item, part, rows])
            if part == 0:
                plgpu.copy_smem_to_gmem(lse_s.at[pl.ds(0, padded_group)], lse_ref.at[item, rows])
            plgpu.wait_smem_to_gmem(0)
