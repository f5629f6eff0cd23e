import json
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxinfer.weights.reader import CheckpointError
from jaxinfer.weights.safetensors import INDEX_NAME, SafetensorsReader

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


def tensors() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {
        "a.weight": rng.standard_normal((5, 3), np.float32),
        "b.weight": rng.standard_normal((7,), np.float32).astype(BFLOAT16),
        "c.weight": rng.standard_normal((2, 4, 3), np.float32).astype(np.float16),
        "d.scalar": np.array(3, np.int64),
        "e.empty": np.zeros((0, 4), np.float32),
    }


@pytest.fixture
def single(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    save_file(tensors(), tmp_path / "model.safetensors", metadata={"format": "pt"})
    return tmp_path


@pytest.fixture
def sharded(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    names = list(tensors())
    parts = (names[:2], names[2:])
    for file, part in zip(SHARDS, parts, strict=True):
        save_file({name: tensors()[name] for name in part}, tmp_path / file)
    weight_map = {name: file for file, part in zip(SHARDS, parts, strict=True) for name in part}
    (tmp_path / INDEX_NAME).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return tmp_path


@pytest.mark.parametrize("layout", ["single", "sharded"])
def test_reads_what_was_written(layout, request):
    directory = request.getfixturevalue(layout)
    reader = SafetensorsReader(directory)
    assert set(reader.names()) == set(tensors())
    for name, expected in tensors().items():
        found = reader.read(name)
        assert reader.shape(name) == found.shape == expected.shape
        assert found.dtype == expected.dtype
        np.testing.assert_array_equal(found, expected)
        assert found.size == 0 or found.ctypes.data % 64 == 0
    assert reader.file_of("a.weight").parent == directory


def test_casts_to_the_asked_dtype(single):
    found = SafetensorsReader(single).read("a.weight", BFLOAT16)
    np.testing.assert_array_equal(found, tensors()["a.weight"].astype(BFLOAT16))


@pytest.mark.parametrize(
    ("config", "dtype"),
    [
        ({"torch_dtype": "bfloat16"}, "bfloat16"),
        ({"dtype": "float16"}, "float16"),
        ({"text_config": {"torch_dtype": "bfloat16"}}, "bfloat16"),
        ({}, "float32"),
    ],
)
def test_dtype_is_the_configs_or_that_of_the_first_matrix(single, config, dtype):
    (single / "config.json").write_text(json.dumps(config))
    assert SafetensorsReader(single).dtype == dtype


def test_configs(single):
    reader = SafetensorsReader(single)
    assert reader.config() == {"model_type": "llama"}
    assert reader.generation_config() is None
    (single / "generation_config.json").write_text('{"eos_token_id": [1, 2]}')
    assert reader.generation_config() == {"eos_token_id": [1, 2]}


def test_a_missing_shard_names_the_file_and_a_tensor(sharded):
    (sharded / SHARDS[1]).unlink()
    with pytest.raises(
        CheckpointError, match=r"model-00002-of-00002\.safetensors is missing.*c\.weight"
    ):
        SafetensorsReader(sharded).names()


def test_a_tensor_of_the_index_that_its_file_lacks_is_named(sharded):
    index = json.loads((sharded / INDEX_NAME).read_text())
    index["weight_map"]["z.weight"] = SHARDS[0]
    (sharded / INDEX_NAME).write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"z\.weight is not in .*model-00001"):
        SafetensorsReader(sharded).names()


def test_every_truncation_names_the_file_and_those_within_the_data_a_tensor(single):
    path = single / "model.safetensors"
    whole = path.read_bytes()
    header_end = 8 + int.from_bytes(whole[:8], "little")
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        named = (
            r"model\.safetensors"
            if size < header_end
            else r"model\.safetensors is cut short: tensor \w\."
        )
        with pytest.raises(CheckpointError, match=named):
            SafetensorsReader(single).names()


def test_a_file_that_shrinks_after_opening_names_the_tensor(single):
    reader = SafetensorsReader(single)
    path = single / "model.safetensors"
    assert reader.read("a.weight").shape == (5, 3)
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - 70)
    with pytest.raises(CheckpointError, match=r"ends within tensor \w\.weight"):
        for name in reader.names():
            reader.read(name)


def test_sizes_that_contradict_the_shape_are_refused(single):
    header = {"x": {"dtype": "F32", "shape": [4], "data_offsets": [0, 12]}}
    text = json.dumps(header).encode()
    (single / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + bytes(12))
    with pytest.raises(CheckpointError, match=r"Tensor x in .* takes 12 bytes"):
        SafetensorsReader(single).names()


def test_damaged_headers_and_unknown_dtypes_are_refused(single):
    path = single / "model.safetensors"
    path.write_bytes((5).to_bytes(8, "little") + b"{abc}" + bytes(9))
    with pytest.raises(CheckpointError, match="damaged safetensors header"):
        SafetensorsReader(single).names()
    text = json.dumps({"x": {"dtype": "F4", "shape": [4], "data_offsets": [0, 2]}}).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(2))
    with pytest.raises(CheckpointError, match=r"Tensor x in .* has dtype F4; supported are"):
        SafetensorsReader(single).names()


def test_a_directory_without_weights_still_gives_its_config(tmp_path):
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        SafetensorsReader(tmp_path)
    (tmp_path / "config.json").write_text('{"dtype": "bfloat16"}')
    reader = SafetensorsReader(tmp_path)
    assert (reader.config(), reader.dtype) == ({"dtype": "bfloat16"}, "bfloat16")
    with pytest.raises(CheckpointError, match=r"holds no \*\.safetensors file"):
        reader.names()


def test_json_that_is_not_an_object_names_the_file(single):
    (single / "config.json").write_text("[1]")
    with pytest.raises(CheckpointError, match=r"config\.json must hold a JSON object"):
        SafetensorsReader(single)


def test_threads_that_read_at_once_share_one_handle(single, monkeypatch):
    reader = SafetensorsReader(single)
    assert reader.names()
    opened, second, whole = [], threading.Event(), Path.open

    def open_slowly(path, *args, **kwargs):
        opened.append(path)
        if len(opened) > 1:
            second.set()
        second.wait(0.2)  # gives the other thread its chance to open the file as well
        return whole(path, *args, **kwargs)

    monkeypatch.setattr(Path, "open", open_slowly)
    with ThreadPoolExecutor(2) as pool:
        read = list(pool.map(reader.read, ["a.weight", "c.weight"]))
    assert len(opened) == 1
    for name, value in zip(("a.weight", "c.weight"), read, strict=True):
        np.testing.assert_array_equal(value, tensors()[name])
