"""Grouped matmul in plain JAX: the portable backend, tuned for CPU.

`jax.lax.ragged_dot` multiplies every row by every group's matrix on anything but a TPU. Here an outer loop takes the
groups that have rows, an inner one a group's rows, a block at a time: a matrix without rows is never read, one with rows
is read once, and temporaries are those of one group.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from kernels_pallas.quantized_matmul.weight import QuantizedWeight, dequantize

_LEAST_BLOCK, _LARGEST_BLOCK = 8, 256
"""Rows. Fewer than eight are slower than eight (bfloat16 on a CPU); more than 256 gain nothing."""


def grouped_matmul(
    rows_mk: jax.Array,
    weights_gnk: jax.Array | QuantizedWeight,
    group_sizes: jax.Array,
    first_row: jax.Array,
    *,
    dtype: jnp.dtype,
) -> jax.Array:
    """See `api.grouped_matmul`.

    A row's result depends on the row and its group's matrix alone, to the bit, among calls of one shape.
    """
    num_rows = rows_mk.shape[0]
    num_groups, num_outputs, _ = weights_gnk.shape
    block = block_rows(num_rows, num_groups)
    ends = first_row + jnp.cumsum(group_sizes)
    starts = ends - group_sizes
    # Those that have rows come first.
    used = jnp.argsort(group_sizes == 0, stable=True)
    # The last block of a group may reach over its end, into rows that are the next group's and stay as they are.
    rows_mk = jnp.pad(rows_mk, ((0, block), (0, 0)))
    precision = lax.Precision.HIGHEST if rows_mk.dtype == jnp.float32 else None

    def one_group(i: jax.Array, out_mn: jax.Array) -> jax.Array:
        group = used[i]
        weight_nk = _matrix(weights_gnk, group, rows_mk.dtype)
        end = ends[group]

        def one_block(state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            row, out_mn = state
            product = lax.dot_general(
                lax.dynamic_slice_in_dim(rows_mk, row, block),
                weight_nk,
                (((1,), (1,)), ((), ())),
                precision=precision,
                preferred_element_type=jnp.float32,
            ).astype(dtype)
            mine = (row + jnp.arange(block, dtype=jnp.int32) < end)[:, None]
            before = lax.dynamic_slice_in_dim(out_mn, row, block)
            product = jnp.where(mine, product, before)
            return row + block, lax.dynamic_update_slice_in_dim(out_mn, product, row, 0)

        return lax.while_loop(lambda s: s[0] < end, one_block, (starts[group], out_mn))[1]

    out_mn = jnp.zeros((num_rows + block, num_outputs), dtype)
    num_used = jnp.sum(group_sizes > 0, dtype=jnp.int32)
    return lax.fori_loop(0, num_used, one_group, out_mn)[:num_rows]


def _matrix(
    weights_gnk: jax.Array | QuantizedWeight, group: jax.Array, dtype: jnp.dtype
) -> jax.Array:
    """[N, K]"""
    if not isinstance(weights_gnk, QuantizedWeight):
        return lax.dynamic_index_in_dim(weights_gnk, group, keepdims=False)
    weight = weights_gnk.map_arrays(lambda x: lax.dynamic_index_in_dim(x, group, keepdims=False))
    # As an array of its own: dequantized within the loop over blocks of rows, it would be so for each block.
    return lax.optimization_barrier(dequantize(weight, dtype))


def block_rows(num_rows: int, num_groups: int) -> int:
    """Rows per block: the power of two that holds an even share of a group."""
    share = -(-num_rows // num_groups)
    return min(max(1 << (share - 1).bit_length(), _LEAST_BLOCK), _LARGEST_BLOCK)
