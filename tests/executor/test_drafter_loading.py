"""Drafters' checkpoints: the names they may use, and what is said of those that don't fit."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from tests.drafter_checkpoints import Eagle3Oracle, MedusaOracle, write
from tests.executor.drafting_harness import DIM, VOCAB, load
from tests.tiny_checkpoints import tiny_checkpoint


@pytest.mark.parametrize("prefix", ["", "model."])
@pytest.mark.parametrize("layer", ["midlayer.", "layers.0."])
def test_eagle3_names(tmp_path: Path, prefix: str, layer: str) -> None:
    oracle = Eagle3Oracle(VOCAB, DIM)
    tensors = {
        (name if name == "lm_head.weight" else prefix + name.replace("midlayer.", layer)): x
        for name, x in oracle.tensors.items()
    }
    drafter = load("eagle3", write(tmp_path / "eagle3", oracle.config, tensors))
    leaves = dict(zip(drafter.module.leaves, drafter.load(), strict=True))
    assert np.array_equal(leaves["hidden_norm",], oracle.tensors["midlayer.hidden_norm.weight"])
    assert np.array_equal(np.arange(41) + leaves["d2t",], oracle.target_ids)
    assert drafter.aux_layers == (2, 1, 0)  # of three layers


def test_eagle3_without_a_map_has_the_whole_vocabulary(tmp_path: Path) -> None:
    oracle = Eagle3Oracle(VOCAB, DIM, draft_vocab=VOCAB)
    tensors = {name: x for name, x in oracle.tensors.items() if name not in ("d2t", "t2d")}
    config = {k: v for k, v in oracle.config.items() if k != "draft_vocab_size"}
    drafter = load("eagle3", write(tmp_path / "eagle3", config, tensors))
    assert ("d2t",) not in drafter.module.leaves


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(vocab_size=98), "98 tokens, the target's has 97"),
        (dict(target_hidden_size=32), "hidden size 32, the target's is 48"),
        (dict(hidden_size=32, target_hidden_size=48), "hidden size 32 and no embedding of its own"),
        (dict(num_hidden_layers=2), "num_hidden_layers .* must be 1, got 2"),
        (dict(norm_before_fc=True), "norm_before_fc"),
        (dict(eagle_aux_hidden_state_layer_ids=[0, 1, 3]), r"0 to 2, got \[0, 1, 3\]"),
        (dict(architectures=["LlamaForCausalLM"]), "LlamaForCausalLMEagle3"),
        (dict(draft_vocab_size=40), r"lm_head.weight .*\(41, 48\), the model's is \(40, 48\)"),
    ],
)
def test_eagle3_that_does_not_fit(tmp_path: Path, changes: dict, message: str) -> None:
    oracle = Eagle3Oracle(VOCAB, DIM)
    path = write(tmp_path / "eagle3", oracle.config | changes, oracle.tensors)
    with pytest.raises(ValueError, match=message):
        load("eagle3", path)


@pytest.mark.parametrize("name", ["fc.weight", "d2t", "midlayer.self_attn.k_proj.weight"])
def test_eagle3_that_lacks_a_tensor(tmp_path: Path, name: str) -> None:
    oracle = Eagle3Oracle(VOCAB, DIM)
    del oracle.tensors[name]
    with pytest.raises(ValueError, match=f"lacks tensor {name}"):
        load("eagle3", write(tmp_path / "eagle3", oracle.config, oracle.tensors))


@pytest.mark.parametrize("converted", [False, True])
def test_medusa_that_does_not_fit(tmp_path: Path, converted: bool) -> None:
    oracle = MedusaOracle(VOCAB, DIM, heads=2, converted=converted)
    path = write(tmp_path / "good", oracle.config, oracle.tensors)
    with pytest.raises(ValueError, match=r"num_speculative_tokens is 3, .* 2 heads"):
        load("medusa", path)
    # Heads that no draft needs are left where they are.
    assert len(load("medusa", path, num_drafts=1).module.leaves) == 5
    path = write(tmp_path / "vocab", oracle.config | dict(vocab_size=98), oracle.tensors)
    with pytest.raises(ValueError, match="vocab_size 98, the target's is 97"):
        load("medusa", path, num_drafts=2)
    path = write(tmp_path / "hidden", oracle.config | dict(hidden_size=32), oracle.tensors)
    with pytest.raises(ValueError, match="hidden_size 32, the target's is 48"):
        load("medusa", path, num_drafts=2)
    missing = "blocks.1.layers.1.weight" if converted else "1.1.linear.weight"
    tensors = {name: x for name, x in oracle.tensors.items() if name != missing}
    with pytest.raises(ValueError, match=f"lacks tensor {missing}"):
        load("medusa", write(tmp_path / "missing", oracle.config, tensors), num_drafts=2)


def test_draft_model_of_another_vocabulary(tmp_path: Path) -> None:
    config = json.loads((tiny_checkpoint("qwen3") / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | dict(vocab_size=101)))
    with pytest.raises(ValueError, match="vocabulary of 97 tokens, it has 101"):
        load("draft_model", tmp_path)


def test_dummy_weights_need_no_tensors(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(Eagle3Oracle(VOCAB, DIM).config))
    drafter = load("eagle3", tmp_path, load_format="dummy")
    assert len(drafter.load()) == len(drafter.module.leaves)
