import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxinfer.weights.loader import load_leaves
from jaxinfer.weights.orbax import OrbaxReader, save_leaves
from jaxinfer.weights.plan import LeafSource, stacked
from jaxinfer.weights.reader import CheckpointError
from jaxinfer.weights.resolve import ORBAX_MARKER, open_checkpoint, resolve_model
from jaxinfer.weights.safetensors import SafetensorsReader

PLAN = {
    ("layers", "0", "gate_up"): stacked(["gate", "up"], (40, 24)),
    ("layers", "0", "norm"): LeafSource(("norm",), ((24,),)),
    ("embed",): LeafSource(("embed",), ((100, 24),)),
}


def abstract(dtype=jnp.bfloat16):
    shapes = {("layers", "0", "gate_up"): (2, 40, 24), ("layers", "0", "norm"): (24,)}
    shapes["embed",] = (100, 24)
    return {path: jax.ShapeDtypeStruct(shape, dtype) for path, shape in shapes.items()}


@pytest.fixture(scope="module")
def original(tmp_path_factory) -> SafetensorsReader:
    directory = tmp_path_factory.mktemp("original")
    rng = np.random.default_rng(0)
    shapes = {"gate": (40, 24), "up": (40, 24), "norm": (24,), "embed": (100, 24)}
    values = {name: rng.standard_normal(shape, np.float32) for name, shape in shapes.items()}
    save_file(values, directory / "model.safetensors")
    (directory / "config.json").write_text('{"model_type": "llama", "dtype": "float32"}')
    (directory / "generation_config.json").write_text('{"eos_token_id": 2}')
    return SafetensorsReader(directory)


@pytest.fixture(scope="module")
def converted(original, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("converted") / "model"
    save_leaves(out, original, PLAN, abstract())
    return out


def test_leaves_come_back_bit_by_bit(original, converted):
    files = resolve_model(str(converted))
    assert files.kind == "orbax"
    expected = load_leaves(original, PLAN, abstract())
    found = load_leaves(open_checkpoint(files), {}, abstract())
    assert found.keys() == expected.keys()
    for path, leaf in expected.items():
        assert found[path].dtype == jnp.bfloat16
        bits, wanted = (np.asarray(x).view(np.uint16) for x in (found[path], leaf))
        np.testing.assert_array_equal(bits, wanted)


def test_configs_come_along_with_the_dtype_of_the_leaves(converted):
    reader = OrbaxReader(converted)
    assert reader.config() == {"model_type": "llama", "dtype": "bfloat16"}
    assert reader.generation_config() == {"eos_token_id": 2}
    assert reader.dtype == "bfloat16"


def test_leaves_are_cast_to_what_the_model_runs_in(converted):
    found = load_leaves(OrbaxReader(converted), {}, abstract(jnp.float32))
    assert {leaf.dtype for leaf in found.values()} == {jnp.dtype(jnp.float32)}


def test_another_layout_is_an_error_that_says_what_to_do(converted):
    leaves = abstract()
    leaves["embed",] = jax.ShapeDtypeStruct((104, 24), jnp.bfloat16)
    with pytest.raises(CheckpointError, match=r"Tensor embed .* load the original"):
        load_leaves(OrbaxReader(converted), {}, leaves)


def test_an_existing_directory_is_not_overwritten(original, converted):
    before = sorted(converted.iterdir())
    with pytest.raises(ValueError, match="exists already"):
        save_leaves(converted, original, PLAN, abstract())
    assert sorted(converted.iterdir()) == before


def test_a_checkpoint_that_does_not_fit_leaves_nothing_behind(original, tmp_path):
    plan = PLAN | {("embed",): LeafSource(("nowhere",), ((100, 24),))}
    with pytest.raises(CheckpointError, match="lacks tensor nowhere"):
        save_leaves(tmp_path / "out", original, plan, abstract())
    assert not (tmp_path / "out").exists()


def test_orbax_itself_restores_the_same_leaves(original, converted):
    import orbax.checkpoint as ocp

    with ocp.PyTreeCheckpointer() as checkpointer:
        restored = checkpointer.restore(converted / "leaves")
    expected = load_leaves(original, PLAN, abstract())
    assert restored.keys() == {".".join(path) for path in expected}
    for path, leaf in expected.items():
        np.testing.assert_array_equal(np.asarray(restored[".".join(path)]), np.asarray(leaf))


def test_damage_names_leaf_and_file(original, tmp_path):
    out = tmp_path / "model"
    save_leaves(out, original, PLAN, abstract())
    chunk = out / "leaves" / "layers.0.gate_up" / "0.0.0"
    whole = chunk.read_bytes()
    chunk.write_bytes(whole[:-1])
    with pytest.raises(
        CheckpointError, match=r"gate_up/0\.0\.0 is cut short: leaf layers\.0\.gate_up"
    ):
        load_leaves(OrbaxReader(out), {}, abstract())
    chunk.unlink()
    with pytest.raises(CheckpointError, match=r"Leaf layers\.0\.gate_up: .*0\.0\.0 is missing"):
        load_leaves(OrbaxReader(out), {}, abstract())
    chunk.write_bytes(whole)
    zarray = out / "leaves" / "embed" / ".zarray"
    text = zarray.read_text()
    zarray.write_text(json.dumps(json.loads(text) | {"chunks": [50, 24]}))
    with pytest.raises(CheckpointError, match=r"Leaf embed in .* is not stored in one piece"):
        load_leaves(OrbaxReader(out), {}, abstract())
    zarray.unlink()
    with pytest.raises(CheckpointError, match="Leaf embed is missing"):
        load_leaves(OrbaxReader(out), {}, abstract())


def test_another_format_asks_for_a_new_conversion(converted, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    marker = json.loads((converted / ORBAX_MARKER).read_text())
    (tmp_path / ORBAX_MARKER).write_text(json.dumps(marker | {"format": 99}))
    with pytest.raises(CheckpointError, match="format 99, this version reads 1"):
        OrbaxReader(tmp_path)


def test_converted_checkpoints_are_not_converted_again(converted, tmp_path):
    with pytest.raises(ValueError, match="converted one already"):
        save_leaves(tmp_path / "out", OrbaxReader(converted), PLAN, abstract())
