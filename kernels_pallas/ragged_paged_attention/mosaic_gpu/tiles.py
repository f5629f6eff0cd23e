"""What the Mosaic GPU attention kernels share: tiles in shared memory, matmuls, page copies, the online softmax.

Scores are kept in base 2: multiplied by log2(e), so that weights are exp2(score - peak), one instruction each.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

ROWS = 64
"""Query rows of one warp group's matmul (wgmma's M)."""

MASKED = -1e30
"""Score of a slot that may not be seen."""

NO_PEAK = -1e29
"""Running maximum before anything was seen. Above MASKED, so that a row that sees nothing gets weights of 0."""

LAYOUT = plgpu.Layout.WGMMA
ROW_LAYOUT = plgpu.Layout.WGMMA.reduce(1)
COLUMN_LAYOUT = plgpu.Layout.WGMMA.reduce(0)
# Row maxima and sums stay within a warp and need none of the scratch memory for reductions.
COMPILER_PARAMS = plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=1024)

LOG2_E = math.log2(math.e)


def tile_columns(head_size: int, itemsize: int = 2) -> int:
    """Width of the tiles in shared memory: the widest swizzle that divides the head size, 16 bytes at least."""
    widths = (n // itemsize for n in (128, 64, 32, 16))
    return next(n for n in widths if head_size % n == 0)


def swizzled(shape: tuple[int, ...], dtype: Any, columns: int | None = None) -> Any:
    """Shared memory of [..., rows, H] in tiles that TMA and, for 16-bit numbers, wgmma understand.

    `columns`: the width of the tiles, None for the widest; both operands of a wgmma need the same.
    """
    itemsize = jnp.dtype(dtype).itemsize
    columns = columns or tile_columns(shape[-1], itemsize)
    transforms = [plgpu.TilingTransform((8, columns))]
    if columns * itemsize > 16:
        transforms.append(plgpu.SwizzleTransform(columns * itemsize))
    return plgpu.SMEM(shape, dtype, transforms=tuple(transforms))


def not_slices(arrays: Any) -> Any:
    """A tree of operands for a kernel that writes to others of its operands.

    XLA (JAX 0.12) wraps a call with an operand that is a slice in a fusion that no longer says what is updated in place.
    """
    return lax.optimization_barrier(arrays)


def load_plain(ref: Any, layout: Any) -> jax.Array:
    """Read memory that is not in tiles, as global memory is, without asking for the widest accesses."""
    return plgpu.load(ref, layout=layout, optimized=False)


def store_plain(ref: Any, value: jax.Array) -> None:
    """Write shared memory that is not in tiles."""
    if hasattr(plgpu, "store"):
        plgpu.store(ref, value, optimized=False)
    else:  # JAX 0.11
        ref[...] = value


def zeros(shape: tuple[int, ...]) -> jax.Array:
    layout = LAYOUT if len(shape) == 2 else ROW_LAYOUT
    return plgpu.layout_cast(jnp.zeros(shape, jnp.float32), layout)


def no_peaks() -> jax.Array:
    return plgpu.layout_cast(jnp.full((ROWS,), NO_PEAK, jnp.float32), ROW_LAYOUT)


def matmul(a: Any, b_ref: Any, acc: jax.Array | None, interpret: Any) -> jax.Array:
    """acc + a @ b in float32 with wgmma, waiting for it. `a` is in shared memory or in registers.

    The interpreter's race detector does not see what wgmma reads, so there, and only there, the operands are read
    in the open. The commit then stands for wgmma's reading on the same side as the copies that refill its operands.
    """
    shape = (a.shape[0], b_ref.shape[1])
    if interpret:
        a = a if isinstance(a, jax.Array) else a[...]
        product = jnp.dot(a, b_ref[...], preferred_element_type=jnp.float32)
        plgpu.commit_smem()
        return product if acc is None else acc + product
    if acc is None:

        def fresh(acc_ref):
            plgpu.wgmma(acc_ref, a, b_ref)
            return acc_ref[...]

        return pl.run_scoped(fresh, plgpu.ACC(shape, jnp.float32))
    return pl.run_state(lambda acc_ref: plgpu.wgmma(acc_ref, a, b_ref))(plgpu.ACC.init(acc))


_COPY_BYTES = 8192
"""At most. With fewer and larger copies LLVM unrolls the loop that issues them, and registers spill."""


def tokens_per_copy(page_size: int, head_size: int, itemsize: int = 2) -> int:
    """A power of two, as page sizes are, and not more than the smallest block has."""
    fitting = _COPY_BYTES // (itemsize * head_size)
    return min(1 << fitting.bit_length() - 1, page_size, ROWS)


def slabs(pages: jax.Array) -> jax.Array:
    """Pages [num_pages, K, S, H] as what one copy brings: [num_pages * K * S / tokens, tokens, H], the same memory."""
    _, _, page_size, head_size = pages.shape
    tokens = tokens_per_copy(page_size, head_size, pages.dtype.itemsize)
    return pages.reshape(-1, tokens, head_size)


def copy_block(
    slabs_ref: Any, tile_ref: Any, barrier: Any, table_ref: Any, row: jax.Array, head: jax.Array,
    first_token: jax.Array, last_page: jax.Array, page_size: int, num_kv_heads: int,
) -> None:  # fmt: skip
    """Start the copies of one block of tokens of a request and head, one arrival on `barrier` per `tokens_per_copy`.

    Pages past the last one are never read; it takes their place, so that each block brings the same number of bytes. The
    slots that are filled this way must be masked.

    Args:
        first_token: where the block begins in the context, at a multiple of `alignment`.
    """
    block, tokens = tile_ref.shape[0], slabs_ref.shape[1]
    slabs_per_page = page_size // tokens
    for i in range(block // tokens):
        # Page sizes are powers of two: shifts and masks take fewer registers than signed division.
        slab = lax.shift_right_logical(first_token, jnp.int32(tokens.bit_length() - 1)) + i
        page = lax.shift_right_logical(slab, jnp.int32(slabs_per_page.bit_length() - 1))
        page = jnp.minimum(page, last_page)
        index = table_ref[row, page] * num_kv_heads + head
        if slabs_per_page > 1:
            index = index * slabs_per_page + (slab & (slabs_per_page - 1))
        part = tile_ref.at[pl.ds(i * tokens, tokens)]
        plgpu.copy_gmem_to_smem(slabs_ref.at[index], part, barrier)


def alignment(page_size: int, block_tokens: int) -> int:
    """Blocks of a request begin at a multiple of this, the first one at the last multiple before the window.

    It is in the window's first page, so that every slot of a block but those past the context has been written.
    """
    return min(page_size, block_tokens)


def clear_unused(v_ref: Any, end: jax.Array) -> None:
    """Zero the rows of a block of values from `end` on: a weight of 0 times NaN would be NaN."""
    block, head_size = v_ref.shape
    columns = tile_columns(head_size)
    # Tile by tile, as a whole block in registers next to the accumulator would spill.
    for start in range(0, head_size, columns):
        part_ref = v_ref.at[:, pl.ds(start, columns)]
        part = plgpu.layout_cast(part_ref[...], LAYOUT)
        row = plgpu.broadcasted_iota(jnp.int32, (block, columns), 0, layout=LAYOUT)
        part_ref[...] = jnp.where(row < end, part, jnp.zeros_like(part))
    plgpu.commit_smem()


def scale_scores(scores: jax.Array, scale: float, soft_cap: float | None) -> jax.Array:
    """Raw q . k to scaled, capped scores in base 2."""
    if soft_cap is None:
        return scores * (scale * LOG2_E)
    # cap * tanh(x), as cap - 2 cap / (exp(2x) + 1): the GPU's quick tanh is off by 2^-11.
    doubled = jnp.exp2(scores * (2 * LOG2_E * scale / soft_cap))
    cap = soft_cap * LOG2_E
    return cap - (2 * cap) / (doubled + 1.0)


def softmax_step(
    scores: jax.Array, acc: jax.Array, peak: jax.Array, total: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """(weights, acc, peak, total) after a block of scores [rows, block]; acc and total fade to the new peak."""
    new_peak = jnp.maximum(peak, scores.max(axis=1))
    fade = jnp.exp2(peak - new_peak)
    weights = jnp.exp2(scores - lax.broadcast_in_dim(new_peak, scores.shape, [0]))
    total = total * fade + weights.sum(axis=1)
    acc = acc * lax.broadcast_in_dim(fade, acc.shape, [0])
    return weights, acc, new_peak, total


def softmax_block(
    scores: jax.Array, factor: float, peak: jax.Array, total: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """(weights, fade, peak, total) after a block of raw scores [rows, block]; -inf is not seen.

    Scores are multiplied by `factor` > 0 in the same instruction that subtracts the peak.
    """
    new_peak = jnp.maximum(peak, scores.max(axis=1) * factor)
    fade = jnp.exp2(peak - new_peak)
    weights = jnp.exp2(scores * factor - lax.broadcast_in_dim(new_peak, scores.shape, [0]))
    return weights, fade, new_peak, total * fade + weights.sum(axis=1)


def faded(acc: jax.Array, fade: jax.Array) -> jax.Array:
    return acc * lax.broadcast_in_dim(fade, acc.shape, [0])


def matmul_beside(
    queries: Any, k_ref: Any, weights: jax.Array, v_ref: Any, acc: jax.Array,
    *, before_values: Callable[[], None], softmax: Callable[[jax.Array], Any], interpret: Any,
) -> tuple[jax.Array, tuple[jax.Array, ...], jax.Array]:  # fmt: skip
    """softmax(queries @ k_ref.T) and acc + weights @ v_ref, which is computed while softmax works.

    Args:
        before_values: called before v_ref is read.
        softmax: scores [rows, block] float32 to the next weights, as float32, and a tuple of three row vectors.

    Returns:
        The next weights in `weights`' dtype, the row vectors, and the sum.
    """
    keys = k_ref.transpose((1, 0))
    if interpret:
        scores = matmul(queries, keys, None, interpret)
        before_values()
        acc = matmul(weights, v_ref, acc, interpret)
        next_weights, rows = softmax(scores)
        return next_weights.astype(weights.dtype), rows, acc

    def run(refs):
        scores_ref, acc_ref, next_ref, *row_refs = refs
        plgpu.wgmma(scores_ref, queries, keys)
        before_values()
        plgpu.wgmma(acc_ref, weights, v_ref)
        next_weights, rows = softmax(plgpu.wgmma_accumulator_load(scores_ref, wait_n=1))
        next_ref[...] = next_weights
        for ref, row in zip(row_refs, rows, strict=True):
            ref[...] = row

    blank, row = zeros((queries.shape[0], k_ref.shape[0])), no_peaks()
    init = (plgpu.ACC.init(blank), plgpu.ACC.init(acc), blank, row, row, row)
    _, acc, next_weights, *rows = pl.run_state(run)(init)
    # Rounded only now: the matmul reads the registers of `weights` until here, and ptxas would serialize
    # everything if those of the next ones were written before.
    next_weights = lax.optimization_barrier(next_weights).astype(weights.dtype)
    return next_weights, tuple(rows), acc


def normalized(acc: jax.Array, total: jax.Array) -> jax.Array:
    """acc / total, and zeros for rows that saw nothing."""
    inverse = 1.0 / jnp.where(total > 0, total, 1.0)
    return acc * lax.broadcast_in_dim(inverse, acc.shape, [0])
