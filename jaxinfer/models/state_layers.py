"""What layers with states have in common: how they are cut over devices, and where their states are."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxinfer.models.layers import constrain, linear, num_partial_sums, product_dtype
from jaxinfer.parallel.mesh import LogicalAxes, named_sharding, partition_spec, tensor_parallel_size

States = tuple[jax.Array, ...]
"""A layer's states, each [num_slots, ...]."""


def shared_channels(num_channels: int, mesh: Mesh) -> int:
    """Raises `ValueError` where the mesh can't share them evenly."""
    devices = tensor_parallel_size(mesh)
    if num_channels % devices:
        raise ValueError(
            f"tensor_parallel_size ({devices}) must divide the model's {num_channels} recurrent channels."
        )
    return num_channels


def on_each_device(mesh: Mesh, function: Callable, in_axes: tuple, out_axes: tuple) -> Callable:
    """`function` on each device's part of its arguments. Axes: logical axes of an array, or of all in a tree, `()` for
    what every device has whole."""
    if tensor_parallel_size(mesh) == 1:
        return function
    return jax.shard_map(
        function,
        mesh=mesh,
        in_specs=tuple(map(partition_spec, in_axes)),
        out_specs=tuple(map(partition_spec, out_axes)),
        check_vma=False,
    )


def state_shape(
    mesh: Mesh, shape: tuple[int, ...], axes: LogicalAxes, dtype: jnp.dtype
) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=named_sharding(mesh, axes))


def project_out(
    mesh: Mesh, hidden: jax.Array, weight: jax.Array, bias: jax.Array | None
) -> jax.Array:
    """[T, *C] times [E, *C] -> [T, E] or [S, T, E] partial sums, where the first axis of C may be cut along the mesh."""
    dtype, num_axes = product_dtype(mesh, hidden.dtype), weight.ndim - 1
    size = weight.size // len(weight)
    parts = num_partial_sums(mesh, len(hidden), len(weight), size) if bias is None else 1
    out = linear(hidden, weight, dtype, num_in_axes=num_axes, num_partial_sums=parts)
    out = constrain(out, mesh, (None, "embed"))
    return out if bias is None else out + bias.astype(dtype)
