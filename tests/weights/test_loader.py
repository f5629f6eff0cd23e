import threading
import tracemalloc
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxinfer.weights import loader
from jaxinfer.weights.loader import check_plan, load_leaves
from jaxinfer.weights.plan import LeafSource, stacked
from jaxinfer.weights.reader import CheckpointError, aligned_empty


class MemoryReader:
    """A checkpoint in memory, which counts the tensors that were read."""

    holds_leaves = False
    dtype = "float32"

    def __init__(self, tensors):
        self.tensors = tensors
        self.read_names = []
        self.lock = threading.Lock()

    def names(self):
        return self.tensors.keys()

    def shape(self, name):
        return self.tensors[name].shape

    def file_of(self, name):
        return Path("memory.safetensors")

    def read(self, name, dtype=None):
        with self.lock:
            self.read_names.append(name)
        value = self.tensors[name]
        out = aligned_empty(value.shape, np.dtype(dtype or value.dtype))
        out[...] = value
        return out


def tensors():
    rng = np.random.default_rng(0)
    return {
        "gate": rng.standard_normal((8, 4), np.float32),
        "up": rng.standard_normal((8, 4), np.float32),
        "norm": rng.standard_normal((4,), np.float32),
    }


PLAN = {
    ("mlp", "gate_up"): stacked(["gate", "up"], (8, 4)),
    ("norm",): LeafSource(("norm",), ((4,),)),
}


def abstract(dtype=jnp.float32, sharding=None):
    return {
        ("mlp", "gate_up"): jax.ShapeDtypeStruct((2, 8, 4), dtype, sharding=sharding),
        ("norm",): jax.ShapeDtypeStruct((4,), dtype),
    }


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_leaves_are_assembled_in_their_dtype(dtype):
    source = tensors()
    leaves = load_leaves(MemoryReader(source), PLAN, abstract(dtype))
    expected = np.stack([source["gate"], source["up"]]).astype(dtype)
    np.testing.assert_array_equal(np.asarray(leaves["mlp", "gate_up"]), expected)
    np.testing.assert_array_equal(np.asarray(leaves["norm",]), source["norm"].astype(dtype))
    assert all(leaf.dtype == dtype for leaf in leaves.values())


def test_each_device_gets_its_shard():
    mesh = Mesh(np.array(jax.devices()[:4]), ("model",))
    sharding = NamedSharding(mesh, PartitionSpec(None, "model"))
    source = tensors()
    leaf = load_leaves(MemoryReader(source), PLAN, abstract(sharding=sharding))["mlp", "gate_up"]
    assert leaf.sharding == sharding
    whole = np.stack([source["gate"], source["up"]])
    for i, shard in enumerate(sorted(leaf.addressable_shards, key=lambda s: s.device.id)):
        np.testing.assert_array_equal(np.asarray(shard.data), whole[:, 2 * i : 2 * i + 2])


def test_all_missing_tensors_are_in_one_error():
    source = tensors()
    del source["up"], source["norm"]
    with pytest.raises(CheckpointError, match=r"memory\.safetensors lacks tensors up, norm of"):
        load_leaves(MemoryReader(source), PLAN, abstract())


def test_unexpected_tensors_are_an_error_unless_ignored():
    source = tensors() | {"vision.a": np.zeros(2, "f4"), "vision.b": np.zeros(2, "f4")}
    reader = MemoryReader(source)
    with pytest.raises(CheckpointError, match=r"holds tensors vision\.a, vision\.b that the model"):
        load_leaves(reader, PLAN, abstract())
    with pytest.raises(CheckpointError, match=r"holds tensor vision\.b that"):
        load_leaves(reader, PLAN, abstract(), ignored=[r"vision\.a", "sion"])
    assert reader.read_names == []
    load_leaves(reader, PLAN, abstract(), ignored=[r"vision\..*"])
    assert sorted(reader.read_names) == ["gate", "norm", "up"]


def test_many_names_are_cut():
    source = tensors() | {f"extra{i}": np.zeros(1, "f4") for i in range(20)}
    with pytest.raises(CheckpointError, match="extra7 and 12 more that"):
        load_leaves(MemoryReader(source), PLAN, abstract())


def test_a_wrong_shape_names_tensor_file_and_both_shapes():
    source = tensors() | {"up": np.zeros((8, 5), np.float32)}
    message = r"Tensor up in memory\.safetensors has shape \(8, 5\), the model's is \(8, 4\)"
    with pytest.raises(CheckpointError, match=message):
        load_leaves(MemoryReader(source), PLAN, abstract())


def test_an_assembly_of_the_wrong_shape_names_the_leaf():
    plan = PLAN | {("norm",): LeafSource(("norm",), ((4,),), lambda tensors: tensors[0][:3])}
    with pytest.raises(ValueError, match=r"Leaf norm was assembled from norm with shape \(3,\)"):
        load_leaves(MemoryReader(tensors()), plan, abstract())


def test_plan_and_model_must_have_the_same_leaves():
    with pytest.raises(ValueError, match=r"differ in leaves \[\('norm',\)\]"):
        check_plan(
            MemoryReader(tensors()), {("mlp", "gate_up"): PLAN["mlp", "gate_up"]}, abstract()
        )


def test_an_error_while_reading_reaches_the_caller():
    class Broken(MemoryReader):
        def read(self, name, dtype=None):
            raise CheckpointError(f"{name} is broken")

    with pytest.raises(CheckpointError, match="is broken"):
        load_leaves(Broken(tensors()), PLAN, abstract())


def test_progress_counts_every_byte():
    sizes = []
    load_leaves(MemoryReader(tensors()), PLAN, abstract(jnp.bfloat16), progress=sizes.append)
    assert sum(sizes) == 2 * (64 + 4)


class GeneratingReader(MemoryReader):
    """Tensors that exist only once they are read."""

    def __init__(self, count, shape):
        self.size, self.read_names, self.lock = shape, [], threading.Lock()
        self.tensors = dict.fromkeys(f"t{i}" for i in range(count))

    def shape(self, name):
        return self.size

    def read(self, name, dtype=None):
        out = aligned_empty(self.size, np.dtype(dtype))
        out[...] = 1
        return out


def test_the_host_holds_a_leaf_and_what_is_read_ahead_but_never_a_second_model(monkeypatch):
    leaf_bytes, count = 2 << 20, 96
    monkeypatch.setattr(loader, "READ_AHEAD_BYTES", 2 * leaf_bytes)
    shape = (leaf_bytes // 4096, 1024)
    reader = GeneratingReader(count, shape)
    # What an assembly makes can't be taken over by JAX, so every byte that tracemalloc sees (numpy's, not JAX's) is
    # memory beyond the model.
    plan = {
        (f"l{i}",): LeafSource((f"t{i}",), (shape,), lambda tensors: tensors[0].copy())
        for i in range(count)
    }
    leaves = {path: jax.ShapeDtypeStruct(shape, jnp.float32) for path in plan}
    tracemalloc.start()
    try:
        loaded = load_leaves(reader, plan, leaves)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(loaded) == count
    # Two read ahead, each twice while it is assembled; JAX lets go of what it copied some calls later, whenever its
    # thread gets to run. None of that grows with the model.
    assert peak < count * leaf_bytes / 3
