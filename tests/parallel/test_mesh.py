from __future__ import annotations

import jax
import pytest
from jax.sharding import PartitionSpec

from jaxinfer.parallel.mesh import make_mesh, named_sharding, replicated, tensor_parallel_size


def test_takes_the_first_devices() -> None:
    mesh = make_mesh(2)
    assert mesh.devices.tolist() == jax.devices()[:2]
    assert tensor_parallel_size(mesh) == 2
    chosen = jax.devices()[2:]
    assert make_mesh(1, chosen).devices.tolist() == chosen[:1]


@pytest.mark.parametrize("size", [0, 5])
def test_impossible_sizes_name_the_number_of_devices(size: int) -> None:
    with pytest.raises(ValueError, match=rf"tensor_parallel_size .* devices \(4\), got {size}"):
        make_mesh(size)


def test_logical_axes_are_looked_up_in_the_table() -> None:
    mesh = make_mesh(2)
    assert named_sharding(mesh, ("kv_heads", None, "embed")).spec == PartitionSpec(
        "model", None, None
    )
    assert replicated(mesh).is_fully_replicated
    with pytest.raises(KeyError):
        named_sharding(mesh, ("kv_head",))
