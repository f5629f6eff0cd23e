"""Attention of requests with many tokens each on Hopper.

A tile is a run of consecutive query tokens of one request and the query heads of one kv head: 64 rows for each of the warp
groups that compute, which share the blocks of keys and values that another one loads page by page. A fixed grid of thread
blocks, one per core, works through the tiles, those with the most keys first.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels_pallas.ragged_paged_attention.mosaic_gpu import dequant, tiles
from kernels_pallas.ragged_paged_attention.mosaic_gpu.columns import row_major
from kernels_pallas.ragged_paged_attention.mosaic_gpu.config import PrefillConfig
from kernels_pallas.ragged_paged_attention.mosaic_gpu.decode_shape import DecodeShape
from kernels_pallas.ragged_paged_attention.mosaic_gpu.merge import Decoded
from kernels_pallas.ragged_paged_attention.mosaic_gpu.prefill_kernel import prefill_kernel
from kernels_pallas.ragged_paged_attention.mosaic_gpu.prefill_plan import (
    PrefillPlan,
    max_prefill_items,
    plan_prefill,
)
from kernels_pallas.ragged_paged_attention.mosaic_gpu.prefill_work import Problem
from kernels_pallas.ragged_paged_attention.mosaic_gpu.tiles import ROWS


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
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    causal: bool = True,
    sinks: jax.Array | None = None,
    kv_scales: tuple[jax.Array, jax.Array] | None = None,
    return_lse: bool = False,
    decoded: tuple[Decoded, DecodeShape] | None = None,
    config: PrefillConfig,
    interpret: Any = None,
) -> tuple[jax.Array, jax.Array | None]:
    """(out [T, N, H], lse [T, N] or None); see `api.ragged_paged_attention`.

    Args:
        query_lens: [R] query_start_loc's differences, or 0 for requests that are left out. Rows of those and rows of no
            request are not written in `out`, and -inf in `lse`.
        decoded: the decode kernel's results for the requests that are left out. Those that it cut are merged here, which
            spares a kernel, and the results are written into its own.
    """
    k_pages, v_pages = kv_pages
    _, num_kv_heads, page_size, head_size = k_pages.shape
    num_tokens, num_heads, _ = q_tnh.shape
    q_dtype, page_dtype = q_tnh.dtype, k_pages.dtype
    config.check(head_size, q_dtype.itemsize, page_dtype.itemsize)
    heads = heads_per_tile(num_heads // num_kv_heads)
    share = tokens_per_consumer(heads)
    head_tiles, tile = num_heads // heads, share * config.consumers
    max_items = max_prefill_items(num_tokens, block_tables.shape[0], tile)
    plan = plan_prefill(
        query_lens,
        query_start_loc,
        seq_lens,
        tile=tile,
        max_items=max_items,
        block=config.block_tokens,
        alignment=tiles.alignment(page_size, config.block_tokens),
        causal=causal,
        sliding_window=sliding_window,
    )
    problem = Problem(
        config=config,
        cores=min(config.cores, max_items * head_tiles),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        heads=heads,
        share=share,
        page_size=page_size,
        dtype=dequant.compute_dtype(q_dtype, page_dtype),
        narrow=dequant.is_narrow(page_dtype),
        scale=scale,
        sliding_window=sliding_window,
        soft_cap=soft_cap,
        causal=causal,
        interpret=interpret,
        decoded=None if decoded is None else decoded[1],
    )
    inputs: dict[str, Any] = {
        "q": q_tnh,
        "k_pages": tiles.slabs(k_pages),
        "v_pages": tiles.slabs(v_pages),
        "tables": block_tables,
        "lens": seq_lens,
        "items": plan.items,
        "num_items": plan.count,
        # One number too many: of numbers in a row XLA makes an iota, a kernel of its own in every layer.
        "columns": np.arange(config.block_tokens + 1, dtype=np.int32) % config.block_tokens,
    }
    if sinks is not None:
        inputs["sinks"] = sinks
    if kv_scales is not None:
        inputs["scales"] = jnp.stack(kv_scales)
    outputs, written = {}, {}
    if decoded is None:
        outputs["out"] = jax.ShapeDtypeStruct(q_tnh.shape, q_dtype)
    else:
        results = decoded[0]
        inputs = tiles.not_slices(inputs | results.inputs())
        written["out"] = jax.new_ref(results.out)
        if results.lse is not None:
            written["token_lse"] = jax.new_ref(results.lse)
        inputs |= written
    if return_lse:
        lse_shape = (max_items, head_tiles, config.consumers, ROWS)
        outputs["lse"] = jax.ShapeDtypeStruct(lse_shape, jnp.float32)
    scratch = _scratch(problem, head_size, q_dtype, page_dtype, return_lse)
    made = plgpu.kernel(
        functools.partial(prefill_kernel, names=(*inputs, *outputs, *scratch), problem=problem),
        out_type=tuple(outputs.values()),
        grid=(problem.cores,),
        grid_names=("core",),
        num_threads=config.consumers + 1,
        thread_name="warp_group",
        scratch_types=list(scratch.values()),
        compiler_params=tiles.COMPILER_PARAMS,
        kernel_name="paged_prefill",
        **({"interpret": interpret} if interpret else {}),
    )(*inputs.values())
    made = dict(zip(outputs, made, strict=True))
    made |= {name: jax.freeze(ref) for name, ref in written.items()}
    if not return_lse:
        return made["out"], None
    lse = _lse_of_tokens(
        made["lse"], made.get("token_lse", -jnp.inf), plan, query_lens, query_start_loc, seq_lens, problem,
        num_tokens,
    )  # fmt: skip
    return made["out"], lse


def _scratch(
    problem: Problem, head_size: int, q_dtype: Any, page_dtype: Any, return_lse: bool
) -> dict[str, Any]:
    """Shared memory and barriers by name."""
    config, heads = problem.config, problem.heads
    block, stages, consumers = config.block_tokens, config.stages, config.consumers
    itemsize = jnp.dtype(page_dtype).itemsize
    copies = block // tiles.tokens_per_copy(problem.page_size, head_size, itemsize)
    slots, arrivals = (1, 1) if problem.narrow else (stages, copies)
    scratch = {
        "q_rows": row_major((consumers, ROWS, head_size), q_dtype),
        "k_ring": tiles.swizzled((slots, block, head_size), problem.dtype),
        "v_ring": tiles.swizzled((slots, block, head_size), problem.dtype),
        "q_full": plgpu.Barrier(num_arrivals=heads * consumers),
        "q_free": plgpu.Barrier(num_arrivals=consumers),
        "k_full": plgpu.Barrier(num_arrivals=arrivals, num_barriers=slots),
        "v_full": plgpu.Barrier(num_arrivals=arrivals, num_barriers=slots),
        "k_free": plgpu.Barrier(num_arrivals=consumers, num_barriers=slots),
        "v_free": plgpu.Barrier(num_arrivals=consumers, num_barriers=slots),
    }
    if not config.queries_in_registers:
        scratch["q_tiles"] = tiles.swizzled((consumers, ROWS, head_size), problem.dtype)
    if config.own_result_tile:
        scratch["o_rows"] = plgpu.SMEM((consumers, ROWS, head_size), q_dtype)
    if problem.narrow:
        columns = tiles.tile_columns(head_size)
        scratch["k_narrow"] = tiles.swizzled((stages, block, head_size), page_dtype, columns)
        scratch["v_narrow"] = tiles.swizzled((stages, block, head_size), page_dtype, columns)
        scratch["narrow_full"] = plgpu.Barrier(num_arrivals=2 * copies, num_barriers=stages)
    else:
        scratch["cleared"] = plgpu.Barrier()
    if return_lse:
        # The last row is the producer's.
        scratch["lse_rows"] = plgpu.SMEM((consumers + 1, ROWS), jnp.float32)
    return scratch


def _lse_of_tokens(
    lse: jax.Array,
    others: jax.Array | float,
    plan: PrefillPlan,
    query_lens: jax.Array,
    query_start_loc: jax.Array,
    seq_lens: jax.Array,
    problem: Problem,
    num_tokens: int,
) -> jax.Array:
    """[T, N] from the tiles' rows [I, head tiles, consumers, 64]; `others` for requests that are left out."""
    share, tile = problem.share, problem.share * problem.config.consumers
    token = jnp.arange(num_tokens, dtype=jnp.int32)
    row = jnp.sum(query_start_loc[1:][None, :] <= token[:, None], axis=1, dtype=jnp.int32)
    is_own = row < query_lens.shape[0]
    row = jnp.minimum(row, query_lens.shape[0] - 1)
    is_own &= query_lens[row] > 0
    offset = token - query_start_loc[row]
    item = plan.rank.at[plan.begins[row] + offset // tile].get(mode="clip")[:, None]
    consumer = (offset % tile // share)[:, None]
    head = jnp.arange(problem.num_heads, dtype=jnp.int32)[None, :]
    tile_row = head % problem.heads * share + (offset % share)[:, None]
    own = lse[item, head // problem.heads, consumer, tile_row]
    own = jnp.where(seq_lens[row][:, None] > 0, own, -jnp.inf)
    return jnp.where(is_own[:, None], own, others)
