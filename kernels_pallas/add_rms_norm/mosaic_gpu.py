"""Residual addition and RMS norm as one Pallas Mosaic GPU kernel for Hopper.

A block of one warp group handles one row and keeps it in registers, so that every byte is read once. All of a row's loads
are independent and stand before the first use: 64 rows of 4096 with four partial sums have 4.6 MiB in flight, which is what
the second-level cache, where these operands come from, can deliver from half of the cores.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

_DTYPES = ("bfloat16", "float16", "float32")
_THREADS = 128
_MAX_EMBED_DIM = 16_384
"""128 float32 registers a thread hold a row of this size, with nothing to spare."""


@dataclass(frozen=True, slots=True)
class Config:
    """How one row lies in a warp group's registers. Raises `ValueError` for what the kernel can't do."""

    embed_dim: int
    dtype: str
    update_dtype: str
    is_plain: bool
    """One update, added as it is. Partial sums and a norm of the update need registers of their own."""

    def __post_init__(self) -> None:
        for name, dtype in (("x_te", self.dtype), ("update", self.update_dtype)):
            if dtype not in _DTYPES:
                raise ValueError(f"{name} must have a dtype of {_DTYPES}, got {dtype}")
        largest = _MAX_EMBED_DIM // (1 if self.is_plain else 2)
        if self.dtype == "float32":
            largest //= 2
        if self.embed_dim % _THREADS or not 0 < self.embed_dim <= largest:
            raise ValueError(
                f"x_te: rows must be a multiple of {_THREADS} elements up to {largest}, "
                f"got {self.embed_dim}"
            )

    @property
    def vector(self) -> int:
        """Neighbouring elements that a thread holds where it can: 16 bytes of the rows that are written."""
        return 16 // jnp.dtype(self.dtype).itemsize

    @property
    def parts(self) -> tuple[tuple[int, int, int], ...]:
        """(first element, width, elements of a vector) of a row's parts: as much as goes in whole vectors, then the
        rest in ever shorter ones."""
        parts, first, vector = [], 0, self.vector
        while first < self.embed_dim:
            step = _THREADS * vector
            if width := (self.embed_dim - first) // step * step:
                parts.append((first, width, vector))
                first += width
            vector //= 2
        return tuple(parts)


def config_for(
    x_te: jax.Array, update: jax.Array, weight: jax.Array, update_weight: jax.Array | None
) -> Config:
    """Of these arguments to `add_rms_norm`. Raises `ValueError` for shapes that the kernel can't do."""
    is_plain = update_weight is None and update.size == x_te.size
    return Config(x_te.shape[-1], x_te.dtype.name, update.dtype.name, is_plain)


def _layout(vector: int) -> Any:
    """Vectors over lanes, then warps, then registers."""
    tiles = ((_THREADS * vector,), (32 * vector,), (vector,))
    return plgpu.Layout.TILED(plgpu.Tiling(tiles), warp_dims=(-3,), lane_dims=(-2,), vector_dim=-1)


def add_rms_norm(
    x_te: jax.Array,
    update: jax.Array,
    weight: jax.Array,
    update_weight: jax.Array | None,
    *,
    eps: float,
    weight_offset: float,
    interpret: Any = None,
) -> tuple[jax.Array, jax.Array]:
    """See `api.add_rms_norm`. Raises as `config_for`."""
    config = config_for(x_te, update, weight, update_weight)
    num_rows, embed_dim = x_te.shape
    partial_sums = update.reshape(-1, num_rows, embed_dim)
    num_partials = partial_sums.shape[0]
    weights = (weight,) if update_weight is None else (weight, update_weight)

    def body(x_ref, partial_ref, *refs):
        *weight_refs, x_out_ref, normed_ref = refs
        row = lax.axis_index("row")

        def load(ref: Any) -> list[jax.Array]:
            return [
                plgpu.load(
                    ref.at[pl.ds(first, width)], layout=_layout(vector), optimized=False
                ).astype(jnp.float32)
                for first, width, vector in config.parts
            ]

        def store(ref: Any, parts: list[jax.Array]) -> None:
            for (first, width, _), part in zip(config.parts, parts, strict=True):
                _store(ref.at[pl.ds(first, width)], part.astype(ref.dtype))

        def normed(parts: list[jax.Array], weight_parts: list[jax.Array]) -> list[jax.Array]:
            squares = sum(jnp.sum(part * part) for part in parts)
            scale = lax.rsqrt(squares * (1 / embed_dim) + eps)
            return [
                part * scale * (w + weight_offset)
                for part, w in zip(parts, weight_parts, strict=True)
            ]

        x_parts = load(x_ref.at[row])
        partials = [load(partial_ref.at[i, row]) for i in range(num_partials)]
        weight_parts, *update_weight_parts = [load(ref) for ref in weight_refs]
        update_parts = [sum(parts) for parts in zip(*partials, strict=True)]
        if update_weight_parts:
            update_parts = normed(update_parts, *update_weight_parts)
        # Rounded before the norm: all that reads the sum later sees the same numbers.
        x_parts = [(x + u).astype(x_te.dtype) for x, u in zip(x_parts, update_parts, strict=True)]
        store(x_out_ref.at[row], x_parts)
        store(normed_ref.at[row], normed([x.astype(jnp.float32) for x in x_parts], weight_parts))

    out = jax.ShapeDtypeStruct(x_te.shape, x_te.dtype)
    kernel = plgpu.kernel(
        body,
        out_type=(out, out),
        grid=(num_rows,),
        grid_names=("row",),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
        kernel_name="add_rms_norm",
        **({} if interpret is None else {"interpret": interpret}),
    )
    return kernel(x_te, partial_sums, *weights)


def _store(ref: Any, value: jax.Array) -> None:
    """JAX 0.11 has no name for it."""
    if hasattr(plgpu, "store"):
        plgpu.store(ref, value, optimized=False)
    else:
        ref[...] = value
