"""Quantized matmul in plain JAX: the portable backend, tuned for CPU.

A loop over blocks of the weight's rows dequantizes one block, which stays in the processor's cache, and multiplies by it.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from kernels_pallas.quantized_matmul.activations import quantize_activations
from kernels_pallas.quantized_matmul.planes import dequantized_planes, planar, rounded
from kernels_pallas.quantized_matmul.weight import (
    QuantizedWeight,
    code_values,
    dequantize,
    group_parameters,
)

_BLOCK_BYTES = 1 << 19
"""Of a dequantized block."""
_EXACT_PRODUCTS = 1024
"""Of int8, that float32 adds up exactly, whatever they are: 1024 * 128 * 127 < 2 ** 24."""

_Product = Callable[[QuantizedWeight], jax.Array]
"""Rows of a weight to x times them, [M, rows] float32."""


def quantized_matmul(x_mk: jax.Array, weight: QuantizedWeight, *, dtype: jnp.dtype) -> jax.Array:
    """See `api.quantized_matmul`; the weight is [N, K]."""
    num_rows = x_mk.shape[0]
    # A CPU multiplies one or two rows by float32 in half the time that 16 bits take.
    compute = jnp.dtype(jnp.float32) if num_rows <= 2 else x_mk.dtype
    if weight.format.activation is not None:
        product = _of_quantized_activations(x_mk, weight, compute)
    else:
        x_planes = planar(x_mk.astype(compute), weight.format)

        def product(block: QuantizedWeight) -> jax.Array:
            planes = dequantized_planes(block, compute)
            return sum(_dot(x, w) for x, w in zip(x_planes, planes, strict=True))

    return _by_blocks(product, weight, num_rows, compute.itemsize, dtype)


def dequantized_matmul(x_mk: jax.Array, weight: QuantizedWeight, *, dtype: jnp.dtype) -> jax.Array:
    """The same with the whole weight at once, for devices that are not made for many small matmuls."""
    if weight.format.activation is not None:
        return _of_quantized_activations(x_mk, weight, x_mk.dtype)(weight).astype(dtype)
    return _dot(x_mk, dequantize(weight, x_mk.dtype), dtype)


def _of_quantized_activations(
    x_mk: jax.Array, weight: QuantizedWeight, compute: jnp.dtype
) -> _Product:
    """Codes of both sides are multiplied as `compute`, which holds them exactly."""
    codes, x_scales = quantize_activations(x_mk, weight)
    num_groups = x_scales.shape[1]
    x_values = rounded(codes.astype(jnp.float32), compute)
    dot = _integer_dot if weight.format.activation == "int8" else _dot

    def product(block: QuantizedWeight) -> jax.Array:
        values = rounded(code_values(block.codes, block.format), compute)
        scales = group_parameters(block).scales.reshape(-1, num_groups)
        if num_groups == 1:
            return dot(x_values, values) * x_scales * scales[:, 0]

        def add_group(group: jax.Array, total: jax.Array) -> jax.Array:
            def part(values: jax.Array) -> jax.Array:
                size = values.shape[1] // num_groups
                return lax.dynamic_slice_in_dim(values, group * size, size, axis=1)

            both = part(x_scales) * part(scales)[:, 0]
            return total + dot(part(x_values), part(values)) * both

        shape = (x_values.shape[0], values.shape[0])
        return lax.fori_loop(0, num_groups, add_group, jnp.zeros(shape, jnp.float32))

    return product


def _by_blocks(
    product: _Product, weight: QuantizedWeight, num_rows: int, itemsize: int, dtype: jnp.dtype
) -> jax.Array:
    num_outputs, size = weight.shape
    rows = min(max(_BLOCK_BYTES // (size * itemsize) // 8 * 8, 8), num_outputs)
    if rows == num_outputs:
        return product(weight).astype(dtype)

    def one_block(i: jax.Array, out_mn: jax.Array) -> jax.Array:
        # The last block is as large as the others and does some rows again.
        start = jnp.minimum(i * rows, num_outputs - rows)
        block = weight.map_arrays(lambda x: lax.dynamic_slice_in_dim(x, start, rows))
        return lax.dynamic_update_slice_in_dim(out_mn, product(block).astype(dtype), start, axis=1)

    out_mn = jnp.zeros((num_rows, num_outputs), dtype)
    return lax.fori_loop(0, -(-num_outputs // rows), one_block, out_mn)


def _dot(x_mk: jax.Array, weight_nk: jax.Array, dtype: jnp.dtype = jnp.float32) -> jax.Array:
    return lax.dot_general(
        x_mk,
        weight_nk,
        (((1,), (1,)), ((), ())),
        precision=lax.Precision.HIGHEST if x_mk.dtype == jnp.float32 else None,
        preferred_element_type=dtype,
    )


def _integer_dot(x_mk: jax.Array, weight_nk: jax.Array) -> jax.Array:
    """Of integers in floats, added up exactly: a CPU's quickest matmuls are those of floats."""
    size = x_mk.shape[1]
    total = jnp.zeros((), jnp.int32)
    for start in range(0, size, _EXACT_PRODUCTS):
        part = slice(start, start + _EXACT_PRODUCTS)
        total = total + _dot(x_mk[:, part], weight_nk[:, part]).astype(jnp.int32)
    return total.astype(jnp.float32)
