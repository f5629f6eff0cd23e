"""What the proofs of architectures leave out: more devices, larger pages, and tensors that a checkpoint needn't hold."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxinfer.weights.reader import CheckpointError
from tests.models.architectures.oracle import prove
from tests.models.architectures.table import ENTRIES
from tests.models.paged_harness import load_checkpoint
from tests.tiny_checkpoints import tiny_checkpoint


@pytest.mark.parametrize("name", ["llama", "gemma3_text"])
def test_four_devices_share_three_kv_heads_or_one(name: str) -> None:
    prove(ENTRIES[name], tensor_parallel_size=4)


def test_page_size_16() -> None:
    prove(ENTRIES["qwen3"], tensor_parallel_size=1, page_size=16)


def test_what_a_checkpoint_holds_twice_is_ignored(tmp_path: Path) -> None:
    original = tiny_checkpoint("llama")
    shutil.copy(original / "config.json", tmp_path)
    tensors = load_file(original / "model.safetensors")
    _, _, expected = load_checkpoint(original)
    assert "lm_head.weight" not in tensors
    for name in (
        "lm_head.weight",
        "model.rotary_emb.inv_freq",
        "model.layers.0.self_attn.rotary_emb.inv_freq",
        "model.layers.1.attn.masked_bias",
    ):
        tensors[name] = np.ones((3, 2), np.float32)
    save_file(tensors, tmp_path / "model.safetensors")
    _, _, found = load_checkpoint(tmp_path)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one, other)
    save_file(
        tensors | {"model.other.weight": tensors["lm_head.weight"]}, tmp_path / "model.safetensors"
    )
    with pytest.raises(CheckpointError, match=r"model\.other\.weight"):
        load_checkpoint(tmp_path)
