"""The device mesh, and the one table that says which logical axis of an array is cut along which mesh axis."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

MODEL_AXIS = "model"

MESH_AXES: dict[str, str | None] = {
    "embed": None,
    "heads": None,  # the query heads of one kv head stay together
    "kv_heads": MODEL_AXIS,
    "mlp": MODEL_AXIS,
    "channels": MODEL_AXIS,  # of layers with states, or groups of their heads
    "vocab": MODEL_AXIS,
    "experts": MODEL_AXIS,
    "latent_heads": MODEL_AXIS,
}
"""Mesh axis of each logical axis; None leaves it whole on every device."""

LogicalAxes = tuple[str | None, ...]


def make_mesh(tensor_parallel_size: int = 1, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """A mesh over the first `tensor_parallel_size` of `devices` (default: all that JAX sees).

    Raises `ValueError` when there are fewer.
    """
    available = jax.devices() if devices is None else list(devices)
    if not 1 <= tensor_parallel_size <= len(available):
        raise ValueError(
            f"tensor_parallel_size must be between 1 and the number of devices "
            f"({len(available)}), got {tensor_parallel_size}."
        )
    return Mesh(np.array(available[:tensor_parallel_size]), (MODEL_AXIS,))


def tensor_parallel_size(mesh: Mesh) -> int:
    return mesh.shape[MODEL_AXIS]


def partition_spec(axes: LogicalAxes) -> PartitionSpec:
    return PartitionSpec(*(None if axis is None else MESH_AXES[axis] for axis in axes))


def named_sharding(mesh: Mesh, axes: LogicalAxes) -> NamedSharding:
    """Where an array with these logical axes (None: an axis that is never cut) lives."""
    return NamedSharding(mesh, partition_spec(axes))


def replicated(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec())


def device_bytes(array: jax.Array | jax.ShapeDtypeStruct) -> int:
    """Bytes of `array` on one of its devices."""
    assert array.sharding is not None
    shape = array.sharding.shard_shape(array.shape)
    return int(np.prod(shape, dtype=np.int64)) * array.dtype.itemsize
