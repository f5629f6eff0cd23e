"""Attention of a few tokens per request on Hopper: split over the context, memory-bound.

A fixed number of thread blocks, two per core where registers allow, each walks over its share of all key blocks
(`mosaic_gpu.decode_plan`). Its producer warp group keeps a ring of key and value tiles filled by TMA, page by page, past
the ends of requests; its consumer warp group folds tile after tile into a running softmax. The keys are wgmma's 64 rows
and a kv head's query heads times tokens its columns, 8 to 64, so that few queries cost little: with 8 columns a
block of 64 keys takes half of the tensor cores' time and an eighth of the exponentials of 64 query rows, and the
accumulator of a head of 128 takes 8 registers a thread instead of 64. Requests that lie in one walk are written where they
belong, the others in parts that a second, small kernel merges.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels_pallas.ragged_paged_attention.mosaic_gpu import tiles
from kernels_pallas.ragged_paged_attention.mosaic_gpu.columns import row_major
from kernels_pallas.ragged_paged_attention.mosaic_gpu.config import DecodeConfig, decode_config
from kernels_pallas.ragged_paged_attention.mosaic_gpu.decode_kernel import QUERY_STAGES, DecodeWalk
from kernels_pallas.ragged_paged_attention.mosaic_gpu.decode_plan import plan_decode
from kernels_pallas.ragged_paged_attention.mosaic_gpu.decode_shape import DecodeShape
from kernels_pallas.ragged_paged_attention.mosaic_gpu.dequant import compute_dtype, is_narrow
from kernels_pallas.ragged_paged_attention.mosaic_gpu.merge import Decoded, merge_parts


def decode_walks(
    q_tnh: jax.Array,
    kv_pages: tuple[jax.Array, jax.Array],
    block_tables: jax.Array,
    seq_lens: jax.Array,
    first_tokens: jax.Array,
    query_lens: jax.Array,
    *,
    max_tokens: int,
    scale: float,
    sliding_window: int | None,
    soft_cap: float | None,
    causal: bool = True,
    sinks: jax.Array | None = None,
    kv_scales: tuple[jax.Array, jax.Array] | None = None,
    return_lse: bool = False,
    num_owned: jax.Array | None = None,
    config: DecodeConfig | None = None,
    interpret: Any = None,
) -> tuple[Decoded, DecodeShape]:
    """The decode kernel's results for q [T, N, H], which `merge.merge_parts` or another kernel completes.

    Args:
        first_tokens: [R] int32, where a request's tokens begin.
        query_lens: [R] int32, how many it has; requests with 0 are left out, those with a seq_len of 0 get zeros.
        max_tokens: no request has more.
        num_owned: [1] int32, how many tokens belong to some request; the others, which follow, get zeros and an lse of
            -inf. None when all do.
    """
    k_pages, v_pages = kv_pages
    num_kv_heads, page_size, head_size = k_pages.shape[1:]
    num_tokens, num_heads, _ = q_tnh.shape
    shape = DecodeShape.of(num_heads // num_kv_heads, head_size, min(max_tokens, num_tokens))
    itemsize = k_pages.dtype.itemsize
    config = config or decode_config(head_size, shape.columns, itemsize)
    config.check(head_size, shape.columns, itemsize)
    num_walks = config.cores * config.blocks_per_core
    plan = plan_decode(
        seq_lens,
        first_tokens,
        query_lens,
        block=config.block_tokens,
        alignment=tiles.alignment(page_size, config.block_tokens),
        sliding_window=sliding_window,
        num_kv_heads=num_heads // shape.group,
        num_walks=num_walks,
        min_blocks=config.min_blocks,
    )
    inputs: dict[str, Any] = {
        "q": q_tnh,
        "k": tiles.slabs(k_pages),
        "v": tiles.slabs(v_pages),
        "tables": block_tables,
        "rows": plan.rows,
        "walks": plan.walks,
    }
    if sinks is not None:
        inputs["sinks"] = sinks
    if kv_scales is not None:
        inputs["k_scales"], inputs["v_scales"] = kv_scales
    results = {"out": jax.ShapeDtypeStruct(q_tnh.shape, q_tnh.dtype)}
    if return_lse:
        results["lse"] = jax.ShapeDtypeStruct(q_tnh.shape[:2], jnp.float32)
    parts = {
        "parts": jax.ShapeDtypeStruct((2 * num_walks, head_size, shape.columns), jnp.float32),
        "part_lse": jax.ShapeDtypeStruct((2 * num_walks, shape.columns), jnp.float32),
    }
    if num_owned is not None:
        inputs["num_owned"] = num_owned
    made = parts | results
    constants = SimpleNamespace(
        shape=shape,
        block=config.block_tokens,
        slots=config.slots,
        page_size=page_size,
        num_kv_heads=num_kv_heads,
        scale=scale,
        sliding_window=sliding_window,
        soft_cap=soft_cap,
        causal=causal,
        interpret=interpret,
    )

    def body(*refs, **scratch):
        named = dict(zip((*inputs, *made), refs, strict=True))
        DecodeWalk(named | scratch, constants).run()

    outputs = plgpu.kernel(
        body,
        out_type=tuple(made.values()),
        grid=(num_walks,),
        grid_names=("walk",),
        num_threads=2,
        thread_name="warp_group",
        scratch_types=_scratch(shape, config, q_tnh.dtype, k_pages, page_size),
        compiler_params=shape.compiler_params,
        kernel_name="paged_decode",
        **({"interpret": interpret} if interpret else {}),
    )(*inputs.values())
    outputs = dict(zip(made, outputs, strict=True))
    decoded = Decoded(
        outputs["out"], outputs.get("lse"), plan, outputs["parts"], outputs["part_lse"]
    )
    return decoded, shape


def decode_attention(
    *args: Any, sinks: jax.Array | None = None, interpret: Any = None, **options: Any
) -> tuple[jax.Array, jax.Array | None]:
    """(out [T, N, H], lse [T, N] or None) of `decode_walks`, completed."""
    decoded, shape = decode_walks(*args, sinks=sinks, interpret=interpret, **options)
    return merge_parts(decoded, sinks, shape=shape, interpret=interpret)


def _scratch(
    shape: DecodeShape, config: DecodeConfig, q_dtype: Any, k_pages: jax.Array, page_size: int
) -> dict[str, Any]:
    head_size, dtype = shape.head_size, compute_dtype(q_dtype, k_pages.dtype)
    columns, block = shape.columns, config.block_tokens
    copies = block // tiles.tokens_per_copy(page_size, head_size, k_pages.dtype.itemsize)
    narrow = is_narrow(k_pages.dtype)
    return {
        "q_in": row_major((QUERY_STAGES, columns, head_size), q_dtype),
        "out_s": row_major((columns, head_size), q_dtype),
        "q_s": tiles.swizzled((columns, head_size), dtype),
        "weights_s": tiles.swizzled(
            (1, columns, block), dtype, columns=tiles.tile_columns(head_size)
        ),
        "ring": tiles.swizzled(
            (config.slots, block, head_size), k_pages.dtype, columns=tiles.tile_columns(head_size)
        ),
        "lse_s": plgpu.SMEM((columns,), jnp.float32),
        "q_full": plgpu.Barrier(num_arrivals=shape.tokens, num_barriers=QUERY_STAGES),
        "q_free": plgpu.Barrier(num_barriers=QUERY_STAGES),
        "full": plgpu.Barrier(num_arrivals=copies, num_barriers=config.slots),
        "free": plgpu.Barrier(num_barriers=config.slots),
        **({"wide_s": tiles.swizzled((1, block, head_size), dtype)} if narrow else {}),
    }
