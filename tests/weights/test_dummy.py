"""Weights that are made up: their numbers, and that the devices make them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxinfer.weights.dummy import dummy_leaves


def test_dummy_weights_are_small_seeded_and_norms_are_one():
    leaves = {
        ("layers", "0", "mlp", "down"): jax.ShapeDtypeStruct((1500, 1000), jnp.bfloat16),
        ("embed",): jax.ShapeDtypeStruct((100, 64), jnp.bfloat16),
        ("layers", "0", "attention_norm"): jax.ShapeDtypeStruct((64,), jnp.bfloat16),
    }
    first, again, other = dummy_leaves(leaves, 1), dummy_leaves(leaves, 1), dummy_leaves(leaves, 2)
    for path, leaf in leaves.items():
        assert (first[path].shape, first[path].dtype) == (leaf.shape, leaf.dtype)
        np.testing.assert_array_equal(np.asarray(first[path]), np.asarray(again[path]))
    values = np.asarray(first["layers", "0", "mlp", "down"], np.float32)
    assert abs(values.mean()) < 1e-3
    assert 0.019 < values.std() < 0.021
    assert np.abs(values).max() < 0.05
    assert (np.asarray(first["embed",]) != np.asarray(other["embed",])).any()
    # Rows must differ: equal ones would hide errors of order.
    assert len(np.unique(values[:, 0].astype(ml_dtypes.bfloat16))) > 50
    np.testing.assert_array_equal(np.asarray(first["layers", "0", "attention_norm"]), 1)


def test_neighbours_and_leaves_of_one_shape_are_not_correlated():
    leaf = jax.ShapeDtypeStruct((256, 256), jnp.float32)
    leaves = dummy_leaves({("a",): leaf, ("b",): leaf})
    a, b = (np.asarray(leaves[name,], np.float64) for name in "ab")
    for x, y in ((a[1:], a[:-1]), (a[:, 1:], a[:, :-1]), (a, b), (a, a.T)):
        off = ~np.isclose(x, y, atol=1e-9)
        assert abs(np.corrcoef(x[off], y[off])[0, 1]) < 0.02
    assert np.linalg.matrix_rank(a) == 256


@pytest.mark.parametrize("spec", [PartitionSpec("model"), PartitionSpec(None, "model")])
def test_dummy_weights_are_made_on_their_devices_and_do_not_depend_on_the_sharding(
    spec, monkeypatch
):
    mesh = Mesh(np.array(jax.devices()[:2]), ("model",))
    sharding = NamedSharding(mesh, spec)
    leaf = jax.ShapeDtypeStruct((8, 4), jnp.float32, sharding=sharding)
    whole = dummy_leaves({("embed",): jax.ShapeDtypeStruct((8, 4), jnp.float32)})["embed",]

    def no_transfer(*_, **__):
        raise AssertionError("a weight came from the host")

    monkeypatch.setattr(jax, "device_put", no_transfer)
    made = dummy_leaves({("embed",): leaf})["embed",]
    assert made.sharding == sharding
    np.testing.assert_array_equal(np.asarray(made), np.asarray(whole))
