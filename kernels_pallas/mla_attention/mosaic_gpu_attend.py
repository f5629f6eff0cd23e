"""Latent attention on Hopper: one kernel for decodes, speculative rows and chunks.

A tile of 64 query rows (tokens times heads) needs a float32 result of 64 x 512, which is all the registers of one warp
group and more. So two warp groups split the columns of the latent, and with them everything: each has its half of the
queries, loads its half of every key block, computes from it its part of the scores, and, as the values are the keys,
weights the very half that it has loaded. All that they exchange are the parts of the scores, through shared memory;
both then do the same softmax. No other warp group loads, as a third would leave each thread 168 registers.

While a block's scores are exchanged and turned into weights, the tensor cores compute the next block's.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels_pallas.mla_attention.mosaic_gpu_config import (
    BLOCK_TOKENS,
    QUERY_TILE,
    RANK,
    RANK_HALF,
    ROPE_HALF,
    ROWS,
    WARP_GROUPS,
    MlaConfig,
)
from kernels_pallas.mla_attention.mosaic_gpu_memory import (
    LN_2,
    clear_unused,
    copy_token_rows,
    opaque,
    swizzled,
)
from kernels_pallas.mla_attention.mosaic_gpu_plan import MlaPlan
from kernels_pallas.ragged_paged_attention.mosaic_gpu import tiles


def attend(
    q_latent_ml: jax.Array,
    q_rope_mr: jax.Array,
    latent_pages: jax.Array,
    block_tables: jax.Array,
    plan: MlaPlan,
    out_ref: Any,
    lse_ref: Any,
    *,
    num_heads: int,
    heads: int,
    scale: float,
    config: MlaConfig,
    interpret: Any = None,
) -> tuple[jax.Array, jax.Array]:
    """Run the plan: write the tiles that are not cut to `out_ref` and `lse_ref`.

    Args:
        q_latent_ml, q_rope_mr: [M, 512], [M, 64] queries, row token * num_heads + head; at least 64 rows from each
            tile's first on.
        out_ref: [T * num_heads, 512].
        lse_ref: [T * num_heads] float32 or None.
        heads: of a tile.

    Returns:
        The pieces of the others in float32: [2 * runs, tiles of heads * 64, 512] normalized results, and
        [2 * runs, tiles of heads * 64] their log-sum-exp in base 2.
    """
    _, page_size, width = latent_pages.shape
    num_runs, head_tiles = plan.runs.shape[0] - 1, num_heads // heads
    block, stages, dtype = BLOCK_TOKENS, config.stages, latent_pages.dtype
    copy_tokens = min(block, page_size)
    slabs = latent_pages.reshape(-1, copy_tokens, width)
    body = functools.partial(
        _run,
        num_heads=num_heads,
        heads=heads,
        page_size=page_size,
        scale=scale,
        config=config,
        interpret=interpret,
    )
    outputs = (out_ref,) if lse_ref is None else (out_ref, lse_ref)
    piece_rows = head_tiles * ROWS
    return plgpu.kernel(
        body,
        out_type=(
            jax.ShapeDtypeStruct((2 * num_runs, piece_rows, RANK), jnp.float32),
            jax.ShapeDtypeStruct((2 * num_runs, piece_rows), jnp.float32),
        ),
        grid=(num_runs, head_tiles),
        grid_names=("run", "heads"),
        num_threads=WARP_GROUPS,
        thread_name="half",
        scratch_types={
            "latent_s": swizzled((WARP_GROUPS, stages * block, RANK_HALF), dtype),
            "rope_s": swizzled((WARP_GROUPS, stages, block, ROPE_HALF), dtype),
            "q_s": swizzled((WARP_GROUPS, config.staged_tiles, ROWS, QUERY_TILE), dtype),
            "q_rope_s": swizzled((WARP_GROUPS, ROWS, ROPE_HALF), dtype),
            "scores_s": swizzled((2, WARP_GROUPS, ROWS, block), jnp.float32),
            "lse_s": plgpu.SMEM((ROWS,), jnp.float32),
            "loaded": plgpu.Barrier(
                num_arrivals=2 * (block // copy_tokens), num_barriers=WARP_GROUPS * stages
            ),
            "q_loaded": plgpu.Barrier(
                num_arrivals=config.staged_tiles + 1, num_barriers=WARP_GROUPS
            ),
            "exchanged": plgpu.Barrier(num_arrivals=WARP_GROUPS),
        },
        compiler_params=tiles.COMPILER_PARAMS,
        kernel_name="mla_attend",
        **({"interpret": interpret} if interpret else {}),
    )(q_latent_ml, q_rope_mr, slabs, block_tables, plan.tiles, plan.runs, *outputs)


def _run(
    q_latent_ref, q_rope_ref, slabs_ref, tables_ref, tiles_ref, runs_ref, out_ref, *refs,
    num_heads, heads, page_size, scale, config, interpret,
    latent_s, rope_s, q_s, q_rope_s, scores_s, lse_s, loaded, q_loaded, exchanged,
):  # fmt: skip
    lse_ref = refs[0] if len(refs) == 3 else None
    parts_ref, parts_lse_ref = refs[-2:]
    run = lax.axis_index("run")
    block, stages = BLOCK_TOKENS, config.stages
    dtype = latent_s.dtype
    tile_tokens = ROWS // heads
    (first_tile, first_block), (last_tile, last_block) = (
        (runs_ref[run + i, 0], runs_ref[run + i, 1]) for i in range(2)
    )

    def one_tile(done, row, first_token, num_tokens, position, first, end_block, ends):
        head_tile, half = (opaque(lax.axis_index(name), done) for name in ("heads", "half"))
        columns = pl.ds(half * RANK_HALF, RANK_HALF)
        num_blocks = end_block - first
        end = position + num_tokens
        last_page = lax.div(end - 1, jnp.int32(page_size))
        first_row = first_token * num_heads + head_tile * heads

        # The ring goes on from tile to tile. Starting at slot 0 would be the same, but then the compiler would keep the
        # descriptors of each of its matmul operands in registers.
        def slot_of(i):
            return lax.rem(done + i, jnp.int32(stages))

        def values_of(i):
            return latent_s.at[half, pl.ds(slot_of(i) * block, block)]

        def fetch(i):
            slot = slot_of(i)
            tokens = slabs_ref.shape[1]
            for part in range(block // tokens):
                # Sizes are powers of two: shifts and masks take fewer registers than division.
                slab = (first + i) * (block // tokens) + part
                slabs_per_page = page_size // tokens
                page = lax.shift_right_logical(slab, jnp.int32(slabs_per_page.bit_length() - 1))
                # Past the context the last page is loaded again, so that each block brings as many bytes.
                slab_id = tables_ref[row, jnp.minimum(page, last_page)] * slabs_per_page
                slab_id += slab & (slabs_per_page - 1)
                barrier = loaded.at[half * stages + slot]
                plgpu.copy_gmem_to_smem(
                    slabs_ref.at[slab_id, :, columns],
                    latent_s.at[half, pl.ds(slot * block + part * tokens, tokens)],
                    barrier,
                )
                plgpu.copy_gmem_to_smem(
                    slabs_ref.at[slab_id, :, pl.ds(RANK + half * ROPE_HALF, ROPE_HALF)],
                    rope_s.at[half, slot, pl.ds(part * tokens, tokens)],
                    barrier,
                )

        pl.loop(0, jnp.minimum(num_blocks, stages))(fetch)
        q_rows = pl.ds(first_row, ROWS)
        in_registers = config.query_tiles * QUERY_TILE
        first_staged = half * RANK_HALF + in_registers
        for i in range(config.staged_tiles):
            part = q_latent_ref.at[q_rows, pl.ds(first_staged + i * QUERY_TILE, QUERY_TILE)]
            plgpu.copy_gmem_to_smem(part, q_s.at[half, i], q_loaded.at[half])
        part = q_rope_ref.at[q_rows, pl.ds(half * ROPE_HALF, ROPE_HALF)]
        plgpu.copy_gmem_to_smem(part, q_rope_s.at[half], q_loaded.at[half])
        queries = None
        if in_registers:
            part = q_latent_ref.at[q_rows, pl.ds(half * RANK_HALF, in_registers)]
            queries = tiles.load_plain(part, tiles.LAYOUT)
        plgpu.barrier_wait(q_loaded.at[half])

        def score_operands(i):
            """Pairs (queries, keys) whose products add up to this half's scores of block i."""
            keys = values_of(i)
            own = opaque(half, done + i)
            if in_registers:
                yield queries, keys.at[:, pl.ds(0, in_registers)]
            for tile in range(config.staged_tiles):
                start = in_registers + tile * QUERY_TILE
                yield q_s.at[own, tile], keys.at[:, pl.ds(start, QUERY_TILE)]
            yield q_rope_s.at[own], rope_s.at[half, slot_of(i)]

        def with_scores(i, overlapped):
            """(overlapped(), scores): the scores of block i are computed meanwhile."""
            if interpret:
                scores = tiles.zeros((ROWS, block))
                for q, keys in score_operands(i):
                    scores = tiles.matmul(q, keys.transpose((1, 0)), scores, interpret)
                return overlapped(), scores

            def start(scores_ref):
                for q, keys in score_operands(i):
                    plgpu.wgmma(scores_ref, q, keys.transpose((1, 0)))
                result = overlapped()
                return result, scores_ref[...]

            return pl.run_scoped(start, plgpu.ACC((ROWS, block), jnp.float32))

        def wait_for(i):
            plgpu.barrier_wait(loaded.at[half * stages + slot_of(i)])

        def mask(scores, start):
            column = plgpu.broadcasted_iota(jnp.int32, scores.shape, 1, layout=tiles.LAYOUT)
            seen_until = position - start
            if tile_tokens > 1:
                row = plgpu.broadcasted_iota(jnp.int32, scores.shape, 0, layout=tiles.LAYOUT)
                seen_until = jnp.minimum(
                    seen_until + lax.div(row, jnp.int32(heads)), end - 1 - start
                )
            return jnp.where(column <= seen_until, scores, tiles.MASKED)

        def step(i, carry):
            acc, peak, total, own = carry
            start = (first + i) * block
            parity = (done + i) & 1
            scores_s[parity, half] = own
            plgpu.barrier_arrive(exchanged)
            pl.when(i + 1 < num_blocks)(lambda: wait_for(i + 1))

            def weigh():
                plgpu.barrier_wait(exchanged)
                scores = own + plgpu.layout_cast(scores_s[parity, 1 - half], tiles.LAYOUT)
                scores = scores * (scale * tiles.LOG2_E)
                on_edge = start + block > position + 1
                scores = lax.cond(on_edge, lambda s: mask(s, start), lambda s: s, scores)
                weights, new_acc, new_peak, new_total = tiles.softmax_step(scores, acc, peak, total)
                values = values_of(i)
                pl.when(start + block > end)(lambda: clear_unused(values, end - start))
                new_acc = tiles.matmul(weights.astype(dtype), values, new_acc, interpret)
                return new_acc, new_peak, new_total

            # Past the last block stale memory gives scores that nobody looks at.
            (acc, peak, total), following = with_scores(i + 1, weigh)
            # All warps are done with the slot, and their own writes to it precede the copy's.
            plgpu.commit_smem()
            pl.when(i + stages < num_blocks)(lambda: fetch(i + stages))
            return acc, peak, total, following

        wait_for(jnp.int32(0))
        _, own = with_scores(jnp.int32(0), lambda: ())
        begin = (tiles.zeros((ROWS, RANK_HALF)), tiles.no_peaks(), tiles.zeros((ROWS,)), own)
        acc, peak, total, _ = lax.fori_loop(0, num_blocks, step, begin)

        write(half, head_tile, first_row, num_tokens, first, ends, acc, peak, total)

    def write(half, head_tile, first_row, num_tokens, first, ends, acc, peak, total):
        """What is whole as results, what is not as a piece."""
        out = tiles.normalized(acc, total)
        lse = peak + jnp.log2(total)
        is_whole = (first == 0) & ends
        piece = 2 * run + (first == 0)
        piece_rows = pl.ds(head_tile * ROWS, ROWS)
        columns = pl.ds(half * RANK_HALF, RANK_HALF)
        to_tokens = functools.partial(
            copy_token_rows,
            first_row=first_row,
            num_tokens=num_tokens,
            num_heads=num_heads,
            heads=heads,
        )

        @pl.when(is_whole)
        def _():
            out_s = latent_s.at[half, pl.ds(0, ROWS)]
            out_s[...] = out.astype(dtype)
            plgpu.commit_smem()
            to_tokens(out_s, lambda rows: out_ref.at[rows, columns])
            plgpu.wait_smem_to_gmem(0)

        @pl.when(~is_whole)
        def _():
            # From registers, as shared memory has no room for float32.
            tiles.store_plain(parts_ref.at[piece, piece_rows, columns], out)

        @pl.when((half == 0) & ~is_whole)
        def _():
            lse_s[...] = lse
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(lse_s, parts_lse_ref.at[piece, piece_rows])
            plgpu.wait_smem_to_gmem(0)

        if lse_ref is not None:

            @pl.when((half == 0) & is_whole)
            def _():
                lse_s[...] = lse * LN_2
                plgpu.commit_smem()
                to_tokens(lse_s, lambda rows: lse_ref.at[rows])
                plgpu.wait_smem_to_gmem(0)

    def visit(i, blocks_done):
        tile = first_tile + i
        row, first_token, num_tokens, position = (tiles_ref[tile, k] for k in range(4))
        num_blocks = lax.div(position + num_tokens + (block - 1), jnp.int32(block))
        first = jnp.where(i == 0, first_block, 0)
        ends = tile != last_tile
        end_block = jnp.where(ends, num_blocks, last_block)

        @pl.when(end_block > first)
        def _():
            one_tile(blocks_done, row, first_token, num_tokens, position, first, end_block, ends)

        return blocks_done + jnp.maximum(end_block - first, 0)

    num_tiles = last_tile - first_tile + (last_block > 0)
    lax.fori_loop(0, num_tiles, visit, jnp.int32(0))
