"""Every family against transformers, through the paged path."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from jaxinfer.weights.reader import CheckpointError
from tests.models.paged_harness import PagedRunner, load_checkpoint
from tests.tiny_checkpoints import CONFIGS, tiny_checkpoint, tiny_model

PROMPTS = [
    np.random.default_rng(1).integers(3, 97, 21).tolist(),
    np.random.default_rng(2).integers(3, 97, 10).tolist(),
]
NUM_NEW_TOKENS = 12


def transformers_logits(name: str, token_ids: list[int]) -> np.ndarray:
    with torch.no_grad():
        return tiny_model(name)(torch.tensor([token_ids])).logits[0].numpy()


@pytest.mark.parametrize("tensor_parallel_size", [1, 2])
@pytest.mark.parametrize("name", [name for name in CONFIGS if name != "gemma3_multimodal"])
def test_logits_and_greedy_tokens_equal_transformers(name: str, tensor_parallel_size: int) -> None:
    check(name, tensor_parallel_size)


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_four_devices_share_three_kv_heads_or_one(name: str) -> None:
    check(name, tensor_parallel_size=4)


def test_text_half_of_a_multimodal_checkpoint() -> None:
    check("gemma3_multimodal", tensor_parallel_size=1)


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


def test_page_size_16() -> None:
    check("qwen3", tensor_parallel_size=1, page_size=16)


def check(name: str, tensor_parallel_size: int, page_size: int = 4) -> None:
    _, model, leaves = load_checkpoint(tiny_checkpoint(name), tensor_parallel_size)
    runner = PagedRunner(model, leaves, page_size)
    for tokens, logits in zip(*runner.greedy(PROMPTS, NUM_NEW_TOKENS), strict=True):
        expected = transformers_logits(name, tokens[:-1])
        np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-4)
        greedy = expected.argmax(-1)[-NUM_NEW_TOKENS:].tolist()
        assert tokens[-NUM_NEW_TOKENS:] == greedy
        assert len(set(greedy)) > 2, "the model repeats itself: equal tokens would prove little"
