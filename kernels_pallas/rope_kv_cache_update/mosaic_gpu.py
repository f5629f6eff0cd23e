"""Norm, rotation and cache write as one Pallas Mosaic GPU kernel for Hopper, in place.

A block handles one token. TMA brings its queries, keys and values into shared memory, queries and keys each as a
matrix of one head per row; registers hold a row's two halves so that a thread has both elements that are rotated
against each other; TMA writes the results, the new keys and values of all kv heads as one strided copy each, straight
into their page. Values touch registers only on their way into 8-bit pages.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels_pallas.quantized_pages import KVScales, quantize
from kernels_pallas.rope_kv_cache_update.mosaic_gpu_config import Config, config_for

KVPages = tuple[jax.Array, jax.Array]


def rope_kv_cache_update(
    qkv: jax.Array,
    kv_pages: KVPages,
    slot_mapping: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    q_norm: jax.Array | None,
    k_norm: jax.Array | None,
    kv_scales: KVScales | None = None,
    *,
    norm_eps: float,
    norm_weight_offset: float,
    interpret: Any = None,
) -> tuple[jax.Array, KVPages]:
    """See `api.rope_kv_cache_update`; `qkv` is rounded to the pages' dtype first unless that has 8 bits. Raises as `config_for`."""
    config = config_for(qkv, kv_pages, cos, q_norm)
    num_tokens, num_kv_heads, group, head_size = qkv.shape
    dtype, kv_dtype = jnp.dtype(config.dtype), jnp.dtype(config.kv_dtype)
    norms = () if q_norm is None else (q_norm, k_norm)
    scales = () if kv_scales is None else kv_scales

    def body(qkv_ref, cos_ref, sin_ref, page_ref, offset_ref, *refs):
        norm_refs, refs = refs[: len(norms)], refs[len(norms) :]
        scale_refs, refs = refs[: len(scales)], refs[len(scales) :]
        k_pages_ref, v_pages_ref, q_out_ref, q_s, k_s, v_s, *narrow, qk_barrier, v_barrier = refs
        token, num_queries = lax.axis_index("token"), group - 2
        q_heads, k_heads, v_heads = (
            heads_s.at[pl.ds(0, num_heads)]
            for heads_s, num_heads in (
                (q_s, config.num_heads),
                (k_s, num_kv_heads),
                (v_s, num_kv_heads),
            )
        )
        plgpu.copy_gmem_to_smem(qkv_ref.at[token, :, num_queries + 1], v_heads, v_barrier)
        plgpu.copy_gmem_to_smem(qkv_ref.at[token, :, num_queries], k_heads, qk_barrier)
        if interpret is None:
            q_grouped = q_heads.reshape(num_kv_heads, num_queries, head_size)
            queries = [(qkv_ref.at[token, :, pl.ds(0, num_queries)], q_grouped)]
        else:  # the interpreter copies to no reshaped reference
            queries = [
                (
                    qkv_ref.at[token, head, pl.ds(0, num_queries)],
                    q_s.at[pl.ds(head * num_queries, num_queries)],
                )
                for head in range(num_kv_heads)
            ]
        for source, target in queries:
            plgpu.copy_gmem_to_smem(source, target, qk_barrier)
        page, offset = page_ref[token], offset_ref[token]
        cos, sin = _columns(config, cos_ref.at[token]), _columns(config, sin_ref.at[token])
        plgpu.barrier_wait(v_barrier)
        if not config.quantized:
            plgpu.copy_smem_to_gmem(v_s, v_pages_ref.at[page, :, offset])
        plgpu.barrier_wait(qk_barrier)
        norm = functools.partial(_normed, config, eps=norm_eps, weight_offset=norm_weight_offset)
        for heads_s, norm_ref in zip((q_s, k_s), norm_refs or (None, None), strict=True):
            for rows in _rounds(config, heads_s.shape[0]):
                parts = norm(_load_rows(config, heads_s.at[rows]), norm_ref)
                parts = _rotated(config, parts, cos, sin)
                if heads_s is k_s and config.quantized:
                    _store_quantized(config, narrow[0], rows, parts, scale_refs[0])
                else:
                    _store_rows(config, heads_s.at[rows], parts)
        if config.quantized:
            for rows in _rounds(config, v_s.shape[0]):
                parts = _load_rows(config, v_s.at[rows])
                _store_quantized(config, narrow[1], rows, parts, scale_refs[1])
            k_heads, v_heads = (heads_s.at[pl.ds(0, num_kv_heads)] for heads_s in narrow)
        plgpu.commit_smem()
        if config.quantized:
            plgpu.copy_smem_to_gmem(v_heads, v_pages_ref.at[page, :, offset])
        plgpu.copy_smem_to_gmem(k_heads, k_pages_ref.at[page, :, offset])
        plgpu.copy_smem_to_gmem(q_heads, q_out_ref.at[token])
        plgpu.wait_smem_to_gmem(0)

    v_rows = config.k_rows if config.quantized else num_kv_heads
    narrow_rows = plgpu.SMEM((config.k_rows, head_size), kv_dtype)
    # Lane semantics: warp group semantics of JAX 0.11 and 0.12 find no layout for unpadded heads in shared memory.
    kernel = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((num_tokens, config.num_heads, head_size), dtype),
        scratch_types=[
            plgpu.SMEM((config.q_rows, head_size), dtype),
            plgpu.SMEM((config.k_rows, head_size), dtype),
            plgpu.SMEM((v_rows, head_size), dtype),
            *([narrow_rows] * 2 if config.quantized else []),
            plgpu.Barrier(num_arrivals=2 if interpret is None else 1 + num_kv_heads),
            plgpu.Barrier(),
        ],
        grid=(num_tokens,),
        grid_names=("token",),
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane,
            # Warps have rows of their own, so that sums over a row exchange nothing through shared memory.
            reduction_scratch_bytes=0,
        ),
        kernel_name="rope_kv_cache_update",
        **({} if interpret is None else {"interpret": interpret}),
    )
    # Not in the kernel: an operand that is a slice, as slots often are, makes XLA (JAX 0.12) wrap the call in a "dynamic
    # slice fusion" that no longer says which operands are updated in place. Computed once for all layers.
    page_size = kv_pages[0].shape[2]
    page, offset = slot_mapping // page_size, slot_mapping % page_size
    k_pages, v_pages = (jax.new_ref(pages) for pages in kv_pages)
    q_tnh = kernel(qkv.astype(dtype), cos, sin, page, offset, *norms, *scales, k_pages, v_pages)
    return q_tnh, (jax.freeze(k_pages), jax.freeze(v_pages))


def _rounds(config: Config, num_rows: int) -> list[Any]:
    """Slices of the rows, as many at once as registers hold."""
    step = config.rows_per_round
    return [pl.ds(first, min(step, num_rows - first)) for first in range(0, num_rows, step)]


def _load_rows(config: Config, rows_s: Any) -> list[jax.Array]:
    """The parts of the rows of `rows_s` [rows, H] in float32."""
    return [
        plgpu.load(rows_s.at[:, pl.ds(first, width)], layout=config.layout, optimized=False).astype(
            jnp.float32
        )
        for first, width in config.parts
    ]


def _over(config: Config, vector: jax.Array, shape: tuple[int, int], axis: int) -> jax.Array:
    """A vector along `axis` of a part of the rows."""
    return plgpu.layout_cast(lax.broadcast_in_dim(vector, shape, (axis,)), config.layout)


def _normed(
    config: Config, parts: list[jax.Array], norm_ref: Any, *, eps: float, weight_offset: float
) -> list[jax.Array]:
    if norm_ref is None:
        return parts
    squares = sum(jnp.sum(part * part, axis=1) for part in parts)
    scale = lax.rsqrt(squares * (1 / config.head_size) + eps)
    weights = [
        _columns(config, norm_ref.at[pl.ds(first, width)]) + weight_offset
        for first, width in config.parts
    ]
    return [
        part * _over(config, scale, part.shape, 0) * _over(config, weight, part.shape, 1)
        for part, weight in zip(parts, weights, strict=True)
    ]


def _rotated(
    config: Config, parts: list[jax.Array], cos: jax.Array, sin: jax.Array
) -> list[jax.Array]:
    first, second, *rest = parts
    cos, sin = (_over(config, x, first.shape, 1) for x in (cos, sin))
    return [first * cos - second * sin, second * cos + first * sin, *rest]


def _store_rows(config: Config, rows_s: Any, parts: list[jax.Array]) -> None:
    for part, (first, width) in zip(parts, config.parts, strict=True):
        _store(rows_s.at[:, pl.ds(first, width)], part.astype(rows_s.dtype))


def _store_quantized(
    config: Config, heads_s: Any, rows: Any, parts: list[jax.Array], scale_ref: Any
) -> None:
    """Divides each row by its head's scale, of which `scale_ref` [K] has no more than there are heads."""
    layout = config.layout.reduce(1)
    head = plgpu.broadcasted_iota(jnp.int32, (rows.size,), 0, layout=layout) + rows.start
    scale = plgpu.layout_cast(jnp.ones((rows.size,), jnp.float32), layout)
    for kv_head in range(config.num_kv_heads):
        scale = jnp.where(head == kv_head, scale_ref[kv_head], scale)
    quantized = [
        quantize(part, _over(config, scale, part.shape, 0), heads_s.dtype) for part in parts
    ]
    _store_rows(config, heads_s.at[rows], quantized)


def _columns(config: Config, vector_ref: Any) -> jax.Array:
    """A vector in global memory, float32, each thread holding its columns."""
    layout = config.layout.reduce(0)
    return plgpu.load(vector_ref, layout=layout, optimized=False).astype(jnp.float32)


def _store(ref: Any, value: jax.Array) -> None:
    """Stores that take bank conflicts where rows are no power of two; JAX 0.11 has no other, and no name for them."""
    if hasattr(plgpu, "store"):
        plgpu.store(ref, value, optimized=False)
    else:
        ref[...] = value
