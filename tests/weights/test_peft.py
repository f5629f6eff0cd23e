"""Adapters in PEFT's format: what is read, and what is refused by its name."""

from __future__ import annotations

import json

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxinfer.weights.peft import read_adapter
from jaxinfer.weights.reader import CheckpointError

MODULE = "model.layers.0.self_attn.q_proj"
PREFIX = f"base_model.model.{MODULE}"


def write(directory, tensors=None, **config):
    written = {"peft_type": "LORA", "r": 2, "lora_alpha": 3} | config
    (directory / "adapter_config.json").write_text(json.dumps(written))
    random = np.random.default_rng(0)
    rank = next(iter((config.get("rank_pattern") or {"": 2}).values()))
    made = {
        f"{PREFIX}.lora_A.weight": random.normal(size=(rank, 6)),
        f"{PREFIX}.lora_B.weight": random.normal(size=(4, rank)),
    }
    arrays = {k: np.asarray(v, np.float32) for k, v in (made | (tensors or {})).items()}
    save_file(arrays, directory / "adapter_model.safetensors")
    return directory


@pytest.mark.parametrize(
    ("config", "scale"),
    [
        ({}, 3 / 2),
        ({"use_rslora": True}, 3 / 2**0.5),
        ({"rank_pattern": {"q_proj": 5}}, 3 / 5),
        ({"rank_pattern": {"layers.0.self_attn.q_proj": 5}, "use_rslora": True}, 3 / 5**0.5),
        ({"alpha_pattern": {r".*\.0\..*_proj": 7}}, 7 / 2),
        ({"alpha_pattern": {"k_proj": 7, "proj": 8}}, 3 / 2),
        ({"init_lora_weights": "gaussian", "bias": "none", "modules_to_save": None}, 3 / 2),
    ],
)
def test_the_scale_is_in_b(tmp_path, config, scale):
    adapter = read_adapter(write(tmp_path, **config), 8)
    tensors = load_file(tmp_path / "adapter_model.safetensors")
    (update,) = [adapter.updates.pop(MODULE)]
    assert not adapter.updates
    np.testing.assert_array_equal(update.a, tensors[f"{PREFIX}.lora_A.weight"])
    np.testing.assert_allclose(update.b, scale * tensors[f"{PREFIX}.lora_B.weight"], rtol=1e-6)


def test_the_key_is_the_contents(tmp_path):
    folders = [tmp_path / name for name in "abcd"]
    for folder in folders:
        folder.mkdir()
    keys = [
        read_adapter(write(folders[0]), 8).key,
        read_adapter(write(folders[1]), 8).key,
        read_adapter(write(folders[2], lora_alpha=4), 8).key,
        read_adapter(write(folders[3], {f"{PREFIX}.lora_B.weight": np.ones((4, 2))}), 8).key,
    ]
    assert keys[0] == keys[1] and len(set(keys)) == 3


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"peft_type": "IA3"}, "peft_type must be \"LORA\", got 'IA3'"),
        ({"use_dora": True}, "use_dora=True is not supported"),
        ({"modules_to_save": ["lm_head"]}, r"modules_to_save=\['lm_head'\] is not supported"),
        ({"target_parameters": ["mlp.experts.down"]}, "target_parameters="),
        ({"bias": "all"}, "bias must be \"none\", got 'all'"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights='pissa' changes"),
        ({"r": None}, f"r of {MODULE} is None"),
        ({"r": 3}, r"q_proj.lora_A.weight has shape \(2, 6\), but the config says rank 3"),
        ({"rank_pattern": {"q_proj": 9}}, "q_proj.lora_A.weight has rank 9; max_lora_rank is 8"),
    ],
)
def test_configs_that_are_refused(tmp_path, config, message):
    with pytest.raises(CheckpointError, match=message):
        read_adapter(write(tmp_path, **config), 8)


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        (
            "base_model.model.model.embed_tokens.lora_embedding_A",
            (2, 6),
            "lora_embedding_A, which is",
        ),
        (f"{PREFIX}.lora_magnitude_vector", (4,), "lora_magnitude_vector, which is not supported"),
        (f"{PREFIX}.lora_B.weight", (4, 3), r"must be \[r, in\] and \[out, r\]"),
        (f"{PREFIX}.lora_A.weight", (2, 6, 1), r"must be \[r, in\] and \[out, r\]"),
        ("base_model.model.other.lora_A.weight", (2, 6), "lacks one of the pair"),
    ],
)
def test_tensors_that_are_refused(tmp_path, name, shape, message):
    with pytest.raises(CheckpointError, match=message):
        read_adapter(write(tmp_path, {name: np.ones(shape)}), 8)


def test_files_that_are_not_there_or_damaged(tmp_path):
    with pytest.raises(CheckpointError, match=r"folder with an adapter_config.json"):
        read_adapter(tmp_path, 8)
    write(tmp_path)
    weights = tmp_path / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-4])
    with pytest.raises(CheckpointError, match="cut short"):
        read_adapter(tmp_path, 8)
    weights.rename(tmp_path / "adapter_model.bin")
    with pytest.raises(CheckpointError, match=r"adapter_model.bin may run code"):
        read_adapter(tmp_path, 8)
    (tmp_path / "adapter_config.json").write_text("{")
    with pytest.raises(CheckpointError, match="not valid JSON"):
        read_adapter(tmp_path, 8)
