"""How one token's heads are laid out in the Mosaic GPU kernel, checked before anything is launched."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels_pallas.quantized_pages import quantized

KVPages = tuple[jax.Array, jax.Array]

_DTYPES = ("bfloat16", "float16", "float32")
_WARPS, _LANES = 4, 32
_TMA_BYTES = 128
"""A TMA copy moves a multiple of this."""
_MAX_BOX = 256
"""Most elements of a TMA copy along one axis."""
_MAX_ELEMENTS_IN_REGISTERS = 64 * _WARPS * _LANES
"""Of one round over a block's rows: 64 float32 registers a thread, and about as many again while they are rotated."""
_SHARED_MEMORY_BYTES = 232_448
"""Hopper's limit for one block."""
_BARRIER_BYTES = 1024
"""At most."""


@dataclass(frozen=True, slots=True)
class Config:
    """How one token's heads are laid out. Raises `ValueError` for what the kernel can't do."""

    num_kv_heads: int
    queries_per_kv: int
    head_size: int
    num_rotated: int
    """The first so many elements of a head are rotated, half of them against the other half."""
    dtype: str
    """Of queries, keys and values as they come, and of the queries as they go."""
    kv_dtype: str
    """Of the pages: `dtype` or one of 8 bits."""
    has_norm: bool

    def __post_init__(self) -> None:
        if self.dtype not in _DTYPES:
            name = "qkv" if self.quantized else "kv_pages"
            raise ValueError(f"{name} must have a dtype of {_DTYPES}, got {self.dtype}")
        if self.head_size > _MAX_BOX or self.head_size % 8:
            raise ValueError(
                f"qkv: head size must be a multiple of 8 up to {_MAX_BOX}, got {self.head_size}"
            )
        if self.num_heads > _MAX_BOX:
            raise ValueError(f"qkv: at most {_MAX_BOX} query heads, got {self.num_heads}")
        if self.kv_dtype == "uint8":
            raise ValueError(
                "kv_pages must have dtype float8_e4m3fn on a GPU, got its bits (uint8)"
            )
        if self.quantized and self.head_size % 16:
            raise ValueError(
                f"qkv: head size must be a multiple of 16 for pages of {self.kv_dtype}, "
                f"got {self.head_size}"
            )
        key_bytes = self.num_kv_heads * self.head_size * jnp.dtype(self.kv_dtype).itemsize
        if key_bytes % _TMA_BYTES:
            raise ValueError(
                f"qkv: a token's {self.num_kv_heads} keys of {self.head_size} elements must take a "
                f"multiple of {_TMA_BYTES} bytes, got {key_bytes}"
            )
        if self._common_width % 2:
            raise ValueError(
                f"cos, sin: the {self.num_rotated} rotated elements of a head of {self.head_size} "
                "must split into halves of an even size, and with QK-norm or 8-bit pages so must "
                "the rest"
            )
        if self.shared_memory_bytes > _SHARED_MEMORY_BYTES:
            raise ValueError(
                f"qkv: one token takes {self.shared_memory_bytes} bytes of shared memory, "
                f"at most {_SHARED_MEMORY_BYTES} are there"
            )

    @property
    def quantized(self) -> bool:
        return quantized(self.kv_dtype)

    @property
    def itemsize(self) -> int:
        return jnp.dtype(self.dtype).itemsize

    @property
    def num_heads(self) -> int:
        return self.num_kv_heads * self.queries_per_kv

    @property
    def parts(self) -> tuple[tuple[int, int], ...]:
        """(first column, width) of what registers hold of a row: the two halves and, to normalise or convert it, the
        rest."""
        half, rest = self.num_rotated // 2, self.head_size - self.num_rotated
        halves = ((0, half), (half, half))
        needed = self.has_norm or self.quantized
        return (*halves, (self.num_rotated, rest)) if needed and rest else halves

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
        """Of a block: queries, keys and values, those on their way into 8-bit pages, each at a multiple of 1024 bytes."""
        wide = (self.q_rows, self.k_rows, self.k_rows if self.quantized else self.num_kv_heads)
        row_bytes = [rows * self.itemsize for rows in wide]
        if self.quantized:
            row_bytes += 2 * [self.k_rows]
        return sum(-(-n * self.head_size // 1024) * 1024 for n in row_bytes) + _BARRIER_BYTES

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
    kv_dtype = kv_pages[0].dtype.name
    return Config(
        num_kv_heads=num_kv_heads,
        queries_per_kv=group - 2,
        head_size=head_size,
        num_rotated=2 * cos.shape[1],
        dtype=qkv.dtype.name if quantized(kv_dtype) else kv_dtype,
        kv_dtype=kv_dtype,
        has_norm=q_norm is not None,
    )
