"""A family that the package doesn't know: registered, found as an entry point, served."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.numpy import load_file, save_file

from jaxinfer import LLM, SamplingParams
from jaxinfer.models import registry
from tests.models.architectures.entry import checkpoint, entry, transformers_model
from tests.tiny_llm import SMALL, TOKENIZER, ids

ARCEE = entry("arcee", num_key_value_heads=4)
"""The same computation, under names of its own."""


@pytest.fixture(autouse=True)
def _registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_FAMILIES", dict(registry._FAMILIES))
    registry._register_installed.cache_clear()


def test_a_registered_family_is_served(tmp_path: Path) -> None:
    import torch

    import tests.models.own_family as own_family

    registry.register(own_family.FAMILY)
    original = checkpoint(ARCEE)
    tensors = {
        name.replace("up_proj", "rise").replace("down_proj", "fall"): tensor
        for name, tensor in load_file(original / "model.safetensors").items()
    }
    save_file(tensors, tmp_path / "model.safetensors")
    config = json.loads((original / "config.json").read_text())
    config["architectures"] = list(own_family.FAMILY.architectures)
    (tmp_path / "config.json").write_text(json.dumps(config))
    TOKENIZER.save(tmp_path)

    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    with LLM(str(tmp_path), **SMALL) as llm:
        (output,) = llm.generate("Hello", params, use_tqdm=False)
    found, tokens = output.outputs[0].token_ids, ids("Hello")
    with torch.no_grad():
        logits = transformers_model(ARCEE)(torch.tensor([[*tokens, *found]])).logits[0]
    assert list(found) == logits[len(tokens) - 1 : -1].argmax(-1).tolist()


def test_an_installed_package_brings_a_family(monkeypatch: pytest.MonkeyPatch) -> None:
    import tests.models.own_family as own_family

    class EntryPoint:
        def load(self) -> registry.Family:
            return own_family.FAMILY

    def entry_points(group: str) -> list[EntryPoint]:
        return [EntryPoint()] if group == "jaxinfer.families" else []

    registry._FAMILIES.pop("SquaredReluForCausalLM", None)
    config = {"architectures": ["SquaredReluForCausalLM"]}
    assert registry.find_family(config) is None
    registry._register_installed.cache_clear()
    monkeypatch.setattr(registry, "entry_points", entry_points)
    assert registry.find_family(config) is own_family.FAMILY
