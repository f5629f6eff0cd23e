"""Leaves and matmuls, which add up in float32."""

from __future__ import annotations

from math import prod

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from jaxinfer.models.stored_weight import StoredWeight
from jaxinfer.parallel.mesh import LogicalAxes, named_sharding, tensor_parallel_size
from kernels_pallas.trace_target import hopper

_NUM_CORES = 132
"""Of a Hopper GPU."""
_LEAST_PART = 512
"""Elements of the contracted axis, below which a tile's start and end cost as much as what is between."""


def leaf(
    shape: tuple[int, ...],
    axes: LogicalAxes,
    dtype: jnp.dtype,
    *,
    num_in_axes: int = 0,
    grouped: bool = False,
) -> nnx.Param:
    """A weight, described once: shape, logical axes and dtype. Its values come from a checkpoint.

    `num_in_axes`: of a weight whose uses take a `StoredWeight` too, how many of the last axes are contracted. `grouped`:
    it is one matrix for each entry of the first axis.
    """
    return nnx.Param(
        jnp.zeros(shape, dtype), logical_axes=axes, num_in_axes=num_in_axes, grouped=grouped
    )


def on_gpu(mesh: Mesh) -> bool:
    return mesh.devices.flat[0].platform in ("gpu", "cuda")


def product_dtype(mesh: Mesh, dtype: jnp.dtype) -> jnp.dtype:
    """In which a layer's matmuls of `dtype` hand on their products.

    A GPU's tensor cores add up in float32 whatever they write, and half the bytes written are time saved; a CPU keeps
    the float32 that it has.
    """
    return jnp.dtype(dtype if on_gpu(mesh) else jnp.float32)


def num_partial_sums(mesh: Mesh, num_tokens: int, out_size: int, in_size: int) -> int:
    """Into how many sums a matmul is cut whose result `add_rms_norm` takes.

    The output of a decode step has so few tiles of 64 x 128 that most cores of a GPU would have none: parts of the
    contracted axis make as many as there are cores. XLA would cut it too, and add up in a kernel of its own. With
    several devices what each has is added up between them first.
    """
    device = mesh.devices.flat[0]
    if not on_gpu(mesh) or not hopper(device.device_kind) or tensor_parallel_size(mesh) > 1:
        return 1
    tiles, parts = -(-num_tokens // 64) * -(-out_size // 128), 1
    while (
        2 * parts * tiles <= _NUM_CORES
        and in_size % (2 * parts) == 0
        and in_size >= 2 * parts * _LEAST_PART
    ):
        parts *= 2
    return parts


def linear(
    x: jax.Array,
    weight: jax.Array | StoredWeight,
    dtype: jnp.dtype = jnp.float32,
    num_in_axes: int = 1,
    num_partial_sums: int = 1,
) -> jax.Array:
    """[T, *in] times [*out, *in] -> [T, *out] in `dtype`, where `in` are `num_in_axes` axes.

    With several partial sums [num_partial_sums, T, *out] in float32, each of one part of `in`; a quantized weight's
    product always comes as a whole.

    The product is of two matrices: on CPU a bf16 matmul whose operand has more axes takes up to ten times as long.
    Only an array's leading axis may be cut along the mesh among those that are merged.
    """
    if isinstance(weight, StoredWeight):
        return weight.matmul(x, dtype)
    num_out_axes = weight.ndim - num_in_axes
    out_shape, in_size = weight.shape[:num_out_axes], prod(weight.shape[num_out_axes:])
    if num_partial_sums > 1:
        parts = jax.lax.dot_general(
            x.reshape(x.shape[0], num_partial_sums, -1),
            weight.reshape(prod(out_shape), num_partial_sums, -1),
            (((2,), (2,)), ((1,), (1,))),
            precision=matmul_precision(weight.dtype),
            preferred_element_type=jnp.float32,
        )
        return parts.reshape(num_partial_sums, x.shape[0], *out_shape)
    product = jax.lax.dot_general(
        x.reshape(x.shape[0], in_size),
        weight.reshape(prod(out_shape), in_size),
        (((1,), (1,)), ((), ())),
        precision=matmul_precision(weight.dtype),
        preferred_element_type=dtype,
    )
    return product.reshape(x.shape[0], *out_shape)


def rows_of(weight_ve: jax.Array | StoredWeight, ids: jax.Array) -> jax.Array:
    """[V, E] and ids [T] -> [T, E]; ids beyond the ends are taken for the last."""
    if isinstance(weight_ve, StoredWeight):
        return weight_ve.take_rows(ids)
    return weight_ve.at[ids].get(mode="clip")


def scaled(x: jax.Array, factor: float) -> jax.Array:
    return x if factor == 1 else x * jnp.asarray(factor, x.dtype)


def matmul_precision(dtype: jnp.dtype) -> jax.lax.Precision:
    """float32 models get float32 products, where a GPU's default would be TF32."""
    return jax.lax.Precision.HIGHEST if dtype == jnp.float32 else jax.lax.Precision.DEFAULT


def constrain(x: jax.Array, mesh: Mesh, axes: LogicalAxes) -> jax.Array:
    """Says how `x` is cut over the devices; all-None axes put the whole of it on each, partial sums added up."""
    if tensor_parallel_size(mesh) == 1:
        return x
    return jax.lax.with_sharding_constraint(x, named_sharding(mesh, axes))
