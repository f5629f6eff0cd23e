"""Norm, rotation and cache write as one Pallas Mosaic GPU kernel for Hopper, in place.

A block handles one token. TMA brings its queries, keys and values into shared memory, queries and keys each as a
matrix of one head per row; registers hold a row's two halves so that a thread has both elements that are rotated
against each other; TMA writes the results, the new keys and values of all kv heads as one strided copy each, straight
into their page. Values never touch registers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

KVPages = tuple[jax.Array, jax.Array]

_DTYPES = ("bfloat16", "float16", "float32")
_WARPS, _LANES = 4, 32
_TMA_BYTES = 128
"""A TMA copy moves a multiple of this."""
_MAX_BOX = 256
"""Most elements of a TMA copy along one axis."""
_MAX_ELEMENTS_IN_REGISTERS = 64 * _WARPS * _LANES
"""Of one round over a block's rows: 64 float32 registers a thread, and about as many again while they are rotated."""
_SHARED_MEMORY_BYTES = 232_448 - 1024
"""Hopper's limit for one block, less what Mosaic takes for barriers."""


@dataclass(frozen=True, slots=True)
class Config:
    """How one token's heads are laid out. Raises `ValueError` for what the kernel can't do."""

    num_kv_heads: int
    queries_per_kv: int
    head_size: int
    num_rotated: int
    """The first so many elements of a head are rotated, half of them against the other half."""
    dtype: str
    has_norm: bool

    def __post_init__(self) -> None:
        if self.dtype not in _DTYPES:
            raise ValueError(f"kv_pages must have a dtype of {_DTYPES}, got {self.dtype}")
        if self.head_size > _MAX_BOX or self.head_size % 8:
            raise ValueError(
                f"qkv: head size must be a multiple of 8 up to {_MAX_BOX}, got {self.head_size}"
            )
        if self.num_heads > _MAX_BOX:
            raise ValueError(f"qkv: at most {_MAX_BOX} query heads, got {self.num_heads}")
        key_bytes = self.num_kv_heads * self.head_size * self.itemsize
        if key_bytes % _TMA_BYTES:
            raise ValueError(
                f"qkv: a token's {self.num_kv_heads} keys of {self.head_size} elements must take a "
                f"multiple of {_TMA_BYTES} bytes, got {key_bytes}"
            )
        if self._common_width % 2:
            raise ValueError(
                f"cos, sin: the {self.num_rotated} rotated elements of a head of {self.head_size} "
                "must split into halves of an even size, and with QK-norm so must the rest"
            )
        if self.shared_memory_bytes > _SHARED_MEMORY_BYTES:
            raise ValueError(
                f"qkv: one token takes {self.shared_memory_bytes} bytes of shared memory, "
                f"at most {_SHARED_MEMORY_BYTES} are there"
            )

    @property
    def itemsize(self) -> int:
        return jnp.dtype(self.dtype).itemsize

    @property
    def num_heads(self) -> int:
        return self.num_kv_heads * self.queries_per_kv

    @property
    def parts(self) -> tuple[tuple[int, int], ...]:
        """(first column, width) of what registers hold of a row: the two halves and, to normalise it, the rest."""
        half, rest = self.num_rotated // 2, self.head_size - self.num_rotated
        halves = ((0, half), (half, half))
        return (*halves, (self.num_rotated, rest)) if self.has_norm and rest else halves

    @property
    def _common_width(self) -> int:
        return math.gcd(*(width for _, width in self.parts))

    @property
    def vector(self) -> int:
        """Neighbouring elements of a row that a thread holds: as many as make up 16 bytes, fewer where the rows that a
        warp group covers at once would otherwise run far over the heads there are."""
        sizes = [n for n in (16 // self.itemsize, 8 // self.itemsize, 4 // self.itemsize)
                 if self._common_width % n == 0]  # fmt: skip

        def rows(vector: int) -> int:
            return sum(self.padded(n, vector) for n in (self.num_heads, self.num_kv_heads))

        return min(sizes, key=lambda vector: (rows(vector), -vector))

    def lanes(self, vector: int) -> int:
        """Threads along a row."""
        return math.gcd(self._common_width // vector, _LANES)

    def padded(self, num_rows: int, vector: int) -> int:
        rows_at_once = _WARPS * _LANES // self.lanes(vector)
        return -(-num_rows // rows_at_once) * rows_at_once

    @property
    def rows_per_round(self) -> int:
        """As many as registers hold."""
        rows_at_once = self.padded(1, self.vector)
        most = _MAX_ELEMENTS_IN_REGISTERS // self.head_size
        return max(1, most // rows_at_once) * rows_at_once

    @property
    def q_rows(self) -> int:
        return self.padded(self.num_heads, self.vector)

    @property
    def k_rows(self) -> int:
        return self.padded(self.num_kv_heads, self.vector)

    @property
    def shared_memory_bytes(self) -> int:
        rows = self.q_rows + self.k_rows + self.num_kv_heads
        return rows * self.head_size * self.itemsize

    @property
    def layout(self) -> Any:
        """Rows over warps and lanes, columns over lanes and each thread's vector; Pallas takes canonical forms only."""
        lanes, vector = self.lanes(self.vector), self.vector
        rows, columns = _LANES // lanes, lanes * vector
        if rows == 1:
            tiles, warp, lane = ((_WARPS, columns), (vector,)), -3, (-2,)
        elif lanes == 1:
            tiles, warp, lane = ((_WARPS * rows, columns), (rows, columns)), -4, (-2,)
        else:
            tiles = ((_WARPS * rows, columns), (rows, columns), (vector,))
            warp, lane = -5, (-3, -2)
        return plgpu.Layout.TILED(
            plgpu.Tiling(tiles), warp_dims=(warp,), lane_dims=lane, vector_dim=-1
        )


def config_for(
    qkv: jax.Array, kv_pages: KVPages, cos: jax.Array, q_norm: jax.Array | None
) -> Config:
    """Raises `ValueError` for shapes that the kernel can't do."""
    _, num_kv_heads, group, head_size = qkv.shape
    dtype = kv_pages[0].dtype.name
    return Config(num_kv_heads, group - 2, head_size, 2 * cos.shape[1], dtype, q_norm is not None)


def rope_kv_cache_update(
    qkv: jax.Array,
    kv_pages: KVPages,
    slot_mapping: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    q_norm: jax.Array | None,
    k_norm: jax.Array | None,
    *,
    norm_eps: float,
    norm_weight_offset: float,
    interpret: Any = None,
) -> tuple[jax.Array, KVPages]:
    """See `api.rope_kv_cache_update`; `qkv` is rounded to the pages' dtype first. Raises as `config_for`."""
    config = config_for(qkv, kv_pages, cos, q_norm)
    num_tokens, num_kv_heads, group, head_size = qkv.shape
    dtype = kv_pages[0].dtype
    norms = () if q_norm is None else (q_norm, k_norm)

    def body(qkv_ref, cos_ref, sin_ref, page_ref, offset_ref, *refs):
        norm_refs, refs = refs[: len(norms)], refs[len(norms) :]
        k_pages_ref, v_pages_ref, q_out_ref, q_s, k_s, v_s, qk_barrier, v_barrier = refs
        token, num_queries = lax.axis_index("token"), group - 2
        q_heads, k_heads = q_s.at[pl.ds(0, config.num_heads)], k_s.at[pl.ds(0, num_kv_heads)]
        plgpu.copy_gmem_to_smem(qkv_ref.at[token, :, num_queries + 1], v_s, v_barrier)
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
        plgpu.copy_smem_to_gmem(v_s, v_pages_ref.at[page, :, offset])
        plgpu.barrier_wait(qk_barrier)
        for heads_s, norm_ref in zip((q_s, k_s), norm_refs or (None, None), strict=True):
            for first in range(0, heads_s.shape[0], config.rows_per_round):
                num_rows = min(config.rows_per_round, heads_s.shape[0] - first)
                rows_s = heads_s.at[pl.ds(first, num_rows)]
                _norm_and_rotate(config, rows_s, cos, sin, norm_ref, norm_eps, norm_weight_offset)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(k_heads, k_pages_ref.at[page, :, offset])
        plgpu.copy_smem_to_gmem(q_heads, q_out_ref.at[token])
        plgpu.wait_smem_to_gmem(0)

    # Lane semantics: warp group semantics of JAX 0.11 and 0.12 find no layout for unpadded heads in shared memory.
    kernel = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((num_tokens, config.num_heads, head_size), dtype),
        scratch_types=[
            plgpu.SMEM((config.q_rows, head_size), dtype),
            plgpu.SMEM((config.k_rows, head_size), dtype),
            plgpu.SMEM((num_kv_heads, head_size), dtype),
            plgpu.Barrier(num_arrivals=2 if interpret is None else 1 + num_kv_heads),
            plgpu.Barrier(),
        ],
        grid=(num_tokens,),
        grid_names=("token",),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
        kernel_name="rope_kv_cache_update",
        **({} if interpret is None else {"interpret": interpret}),
    )
    # Not in the kernel: an operand that is a slice, as slots often are, makes XLA (JAX 0.12) wrap the call in a "dynamic
    # slice fusion" that no longer says which operands are updated in place. Computed once for all layers.
    page_size = kv_pages[0].shape[2]
    page, offset = slot_mapping // page_size, slot_mapping % page_size
    k_pages, v_pages = (jax.new_ref(pages) for pages in kv_pages)
    q_tnh = kernel(qkv.astype(dtype), cos, sin, page, offset, *norms, k_pages, v_pages)
    return q_tnh, (jax.freeze(k_pages), jax.freeze(v_pages))


def _norm_and_rotate(
    config: Config, rows_s: Any, cos: Any, sin: Any, norm_ref: Any, eps: float, weight_offset: float
) -> None:
    """Normalises and rotates the rows of `rows_s` [rows, H] where they lie."""
    num_rows = rows_s.shape[0]
    parts_s = [rows_s.at[:, pl.ds(first, width)] for first, width in config.parts]
    parts = [
        plgpu.load(part_s, layout=config.layout, optimized=False).astype(jnp.float32)
        for part_s in parts_s
    ]

    def over(vector: jax.Array, width: int, axis: int) -> jax.Array:
        return plgpu.layout_cast(
            lax.broadcast_in_dim(vector, (num_rows, width), (axis,)), config.layout
        )

    if norm_ref is not None:
        squares = sum(jnp.sum(part * part, axis=1) for part in parts)
        scale = lax.rsqrt(squares * (1 / config.head_size) + eps)
        weights = [
            _columns(config, norm_ref.at[pl.ds(first, width)]) + weight_offset
            for first, width in config.parts
        ]
        parts = [
            part * over(scale, width, 0) * over(weight, width, 1)
            for part, weight, (_, width) in zip(parts, weights, config.parts, strict=True)
        ]
    half = config.num_rotated // 2
    cos, sin = over(cos, half, 1), over(sin, half, 1)
    first, second, *rest = parts
    rotated = [first * cos - second * sin, second * cos + first * sin, *rest]
    for part_s, value in zip(parts_s, rotated, strict=True):
        _store(part_s, value.astype(rows_s.dtype))


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
