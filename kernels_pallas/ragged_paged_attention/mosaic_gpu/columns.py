"""Softmax with the keys as wgmma's 64 rows and the queries as its columns, for kernels with few queries.

Scores are [keys, columns], accumulators [H, columns] in parts of 64 rows; what belongs to a query is a vector over
columns. Column token * heads + head: `heads` is the query heads of a kv head, or a few more where TMA needs them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels_pallas.ragged_paged_attention.mosaic_gpu import tiles
from kernels_pallas.ragged_paged_attention.mosaic_gpu.tiles import COLUMN_LAYOUT, LAYOUT

ROWS = 64


def unknown_zero() -> jax.Array:
    """A zero that LLVM can't see through: added to what it could compute before a loop, it keeps that out of registers."""
    return lax.optimization_barrier(jnp.int32(0))


def row_major(shape: tuple[int, ...], dtype: Any) -> Any:
    """Shared memory of [..., columns, H] as it lies in global memory.

    Tiles of one row lie like that; without them Pallas picks tiles of its own.
    """
    tiling = plgpu.TilingTransform((1, tiles.tile_columns(shape[-1])))
    return plgpu.SMEM(shape, dtype, transforms=(tiling,))


def parts_of(head_size: int) -> tuple[int, ...]:
    """Where parts of 64 rows that cover the head begin; the last two overlap when 64 does not divide it."""
    return tuple(sorted({min(start, head_size - ROWS) for start in range(0, head_size, ROWS)}))


def padded_heads(group: int, head_size: int) -> int:
    """Columns of one token: its rows in shared memory must begin where TMA can put them, at a multiple of 128 bytes."""
    heads = group
    while heads * head_size * 2 % 128:
        heads += 1
    return heads


def zeros(shape: tuple[int, ...]) -> jax.Array:
    layout = LAYOUT if len(shape) == 2 else COLUMN_LAYOUT
    return plgpu.layout_cast(jnp.zeros(shape, jnp.float32), layout)


def no_peaks(columns: int) -> jax.Array:
    return plgpu.layout_cast(jnp.full((columns,), tiles.NO_PEAK, jnp.float32), COLUMN_LAYOUT)


def over_rows(vector: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    return lax.broadcast_in_dim(vector, shape, [1])


def store_transposed(ref: Any, value: jax.Array, interpret: Any) -> None:
    """ref [columns, rows] in tiles = value [rows, columns] of 16 bits."""
    if interpret:
        ref[...] = value.T
    else:
        value = plgpu.layout_cast(value, plgpu.Layout.WGMMA_TRANSPOSED)
        ref.transpose((1, 0))[...] = value


def store_transposed_plain(ref: Any, value: jax.Array, interpret: Any) -> None:
    """The same for memory that is not in tiles."""
    if interpret:
        ref[...] = value.T
    else:
        tiles.store_plain(ref.transpose((1, 0)), value)


def load_transposed_plain(ref: Any, interpret: Any) -> jax.Array:
    """[rows, columns] of ref [columns, rows], which is not in tiles."""
    if interpret:
        return ref[...].T
    return tiles.load_plain(ref.transpose((1, 0)), LAYOUT)


def no_totals(keys: int, columns: int) -> jax.Array:
    """Sums of weights: over blocks only, as over keys they take an exchange between warps, or where that would take too
    many registers over both.
    """
    return zeros((keys, columns) if columns <= 32 else (columns,))


def softmax_step(
    scores: jax.Array, accs: Sequence[jax.Array], peak: jax.Array, total: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, ...], jax.Array, jax.Array]:
    """(weights, accs, peak, total) after a block of scores; accs and total fade to the new peak."""
    new_peak = jnp.maximum(peak, scores.max(axis=0))
    fade = jnp.exp2(peak - new_peak)
    weights = jnp.exp2(scores - over_rows(new_peak, scores.shape))
    if total.ndim == 2:
        total = total * over_rows(fade, scores.shape) + weights
    else:
        total = total * fade + weights.sum(axis=0)
    accs = tuple(acc * over_rows(fade, acc.shape) for acc in accs)
    return weights, accs, new_peak, total


def sinks_of(
    sinks_ref: Any, first_head: jax.Array, group: int, heads: int, columns: int, first_column: Any = 0
) -> Any:  # fmt: skip
    """The sinks [columns] in base 2 of `group` query heads, for each token, from a column on."""
    column = plgpu.broadcasted_iota(jnp.int32, (columns,), 0, layout=COLUMN_LAYOUT)
    column = column + first_column + unknown_zero()
    head = lax.rem(column, jnp.full_like(column, heads))
    sinks = no_peaks(columns)
    for i in range(group):
        sinks = jnp.where(head == i, sinks_ref[first_head + i] * tiles.LOG2_E, sinks)
    return sinks


def finish(peak: jax.Array, total: jax.Array, sinks: jax.Array | None) -> Any:
    """(factor on the accumulators, log-sum-exp in base 2), both [columns]; 0 and -inf for columns that saw nothing."""
    empty = total <= 0
    fade = jnp.ones_like(total)
    if sinks is not None:
        top = jnp.maximum(peak, sinks)
        fade = jnp.exp2(peak - top)
        total, peak = total * fade + jnp.exp2(sinks - top), top
    factor = jnp.where(empty, 0.0, fade / jnp.where(empty, 1.0, total))
    lse = jnp.where(empty, -jnp.inf, peak + jnp.log2(jnp.where(empty, 1.0, total)))
    return factor, lse


class TokenWriter:
    """Writes results of one request and kv head, [H, columns], to their places in [T, N, H] and [T, N].

    Goes through shared memory: out_s [columns, H], not in tiles, and lse_s [columns].
    """

    def __init__(
        self, out_ref: Any, lse_ref: Any, out_s: Any, lse_s: Any, *,
        group: int, heads: int, interpret: Any,
    ) -> None:  # fmt: skip
        self.out_ref, self.lse_ref, self.out_s, self.lse_s = out_ref, lse_ref, out_s, lse_s
        self.group, self.heads, self.interpret = group, heads, interpret

    def stage(self, accs: Sequence[jax.Array]) -> None:
        """Put results into shared memory, once what left through it before is gone."""
        self.wait()
        self.put(accs)
        plgpu.commit_smem()

    def wait(self) -> None:
        """For what leaves through shared memory."""
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    def put(self, accs: Sequence[jax.Array], first_column: Any = 0) -> None:
        columns, head_size = accs[0].shape[1], self.out_s.shape[1]
        for start, acc in zip(parts_of(head_size), accs, strict=True):
            part = self.out_s.at[pl.ds(first_column, columns), pl.ds(start, ROWS)]
            store_transposed_plain(part, acc.astype(self.out_s.dtype), self.interpret)

    def send(self, token: jax.Array, first_head: jax.Array, num_tokens: jax.Array) -> None:
        """Start the copies of what was staged."""

        @pl.loop(0, num_tokens)
        def _(i):
            plgpu.copy_smem_to_gmem(
                self.out_s.at[pl.ds(i * self.heads, self.group)],
                self.out_ref.at[token + i, pl.ds(first_head, self.group)],
            )

    def put_lse(self, lse: jax.Array, first_column: Any = 0) -> None:
        """Log-sum-exps in base 2 into shared memory."""
        if self.lse_ref is None:
            return
        lse_s = self.lse_s.at[pl.ds(first_column, lse.shape[0])]
        tiles.store_plain(lse_s, lse * (1 / tiles.LOG2_E))

    def write_lse(self, token: jax.Array, first_head: jax.Array, num_tokens: jax.Array) -> None:
        """Write what `put_lse` left."""
        if self.lse_ref is None:
            return

        # One loop of unknown length: LLVM would unroll one over heads, at the cost of many registers.
        @pl.loop(0, num_tokens * self.group)
        def _(i):
            row = lax.div(i, jnp.int32(self.group))
            head = i - row * self.group
            self.lse_ref[token + row, first_head + head] = self.lse_s[row * self.heads + head]
