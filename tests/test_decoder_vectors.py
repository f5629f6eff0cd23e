"""Decoders that make vectors, through the paged cache, against transformers."""

from __future__ import annotations

import json
import shutil
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from jaxinfer import LLM, PoolingParams
from tests.tiny_checkpoints import tiny_checkpoint
from tests.tiny_encoders import with_sentence_transformers
from tests.tiny_llm import TOKENIZER, VOCAB

CLOSE = dict(rtol=0, atol=1e-4)
rng = np.random.default_rng(0)
PROMPTS = [rng.integers(3, VOCAB, n).tolist() for n in (1, 5, 17, 40, 3, 33)]
CHUNKED = dict(
    max_model_len=48, block_size=4, max_num_seqs=4, max_num_batched_tokens=16, dtype="float32"
)


@cache
def checkpoint(name: str, suffix: str, directory: str, **config) -> Path:
    """The tiny model of that name as `suffix` of transformers has it: without a head for tokens, or with one for classes."""
    causal = transformers.AutoModelForCausalLM.from_pretrained(
        tiny_checkpoint(name), dtype=torch.float32
    )
    kind = type(causal).__name__.removesuffix("ForCausalLM") + suffix
    made = causal.config
    for key, value in config.items():
        setattr(made, key, value)
    torch.manual_seed(0)
    model = getattr(transformers, kind)(made).float()
    backbone = model if suffix == "Model" else model.model
    backbone.load_state_dict(causal.model.state_dict())
    path = Path(directory) / f"{name}-{suffix}"
    model.save_pretrained(path)
    TOKENIZER.save(path)
    return path


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return str(tmp_path_factory.mktemp("decoders"))


def states(path: Path, ids: list[int]) -> np.ndarray:
    model = transformers.AutoModel.from_pretrained(path, dtype=torch.float32).eval()
    with torch.no_grad():
        return model(torch.tensor([ids])).last_hidden_state[0].numpy()


def unit(x) -> np.ndarray:
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


def embeddings(llm, prompts, **args) -> np.ndarray:
    return np.array([o.outputs.embedding for o in llm.embed(prompts, use_tqdm=False, **args)])


@pytest.mark.parametrize("name", ["qwen3", "mistral"])
def test_the_last_tokens_state_is_the_embedding_and_prefixes_are_computed_once(name, directory):
    path = checkpoint(name, "Model", directory)
    expected = [unit(states(path, ids)[-1]) for ids in PROMPTS]
    with LLM(str(path), **CHUNKED) as llm:
        np.testing.assert_allclose(embeddings(llm, PROMPTS), expected, **CLOSE)
        again = llm.embed(PROMPTS, use_tqdm=False)
        tokens = llm.encode(PROMPTS, use_tqdm=False, pooling_task="token_embed")
        preempted = embeddings(llm, PROMPTS * 3)
    np.testing.assert_allclose([o.outputs.embedding for o in again], expected, **CLOSE)
    np.testing.assert_allclose(preempted, expected * 3, **CLOSE)
    if name == "qwen3":  # of the other one, windows have let go of the beginnings
        assert again[3].num_cached_tokens > 0
    for ids, output in zip(PROMPTS, tokens, strict=True):
        np.testing.assert_allclose(output.outputs.data, states(path, ids), **CLOSE)
        assert output.num_cached_tokens == 0


@pytest.mark.parametrize("blocks", [None, 14])
def test_means_add_up_over_chunks_and_preemptions(directory, blocks):
    path = checkpoint("llama", "Model", directory)
    expected = [unit(states(path, ids).mean(0)) for ids in PROMPTS]
    args = CHUNKED | dict(num_gpu_blocks_override=blocks, pooler_config={"pooling_type": "MEAN"})
    with LLM(str(path), **args) as llm:
        for _ in range(2):  # the second time, all prompts could be in the cache
            np.testing.assert_allclose(embeddings(llm, PROMPTS), expected, **CLOSE)


def test_a_model_for_tokens_makes_embeddings_where_it_is_asked_to(tmp_path):
    path = tmp_path / "model"
    shutil.copytree(tiny_checkpoint("qwen3"), path)
    TOKENIZER.save(path)
    expected = [unit(states(path, ids)[-1]) for ids in PROMPTS[:3]]
    with LLM(str(path), runner="pooling", **CHUNKED) as llm:
        np.testing.assert_allclose(embeddings(llm, PROMPTS[:3]), expected, **CLOSE)
        with pytest.raises(ValueError, match="makes vectors"):
            llm.generate("a")
    with LLM(str(path), **CHUNKED) as llm:
        assert llm.config.pooler is None
        with pytest.raises(ValueError, match="runner='pooling'"):
            llm.embed("a")
    with_sentence_transformers(path, "lasttoken", normalize=False, max_seq_length=30)
    with LLM(str(path), **CHUNKED | dict(max_model_len=None)) as llm:
        assert llm.config.model.max_model_len == 30
        expected = [states(path, ids)[-1] for ids in PROMPTS[:3]]
        np.testing.assert_allclose(embeddings(llm, PROMPTS[:3]), expected, **CLOSE)


@pytest.mark.parametrize("name", ["qwen3", "llama_biased"])
def test_classes_of_a_decoder(name, directory):
    path = checkpoint(name, "ForSequenceClassification", directory, num_labels=3, pad_token_id=0)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(
        path, dtype=torch.float32
    ).eval()
    with torch.no_grad():
        logits = [model(torch.tensor([ids])).logits[0].numpy() for ids in PROMPTS]
    raw = PoolingParams(use_activation=False)
    with LLM(str(path), **CHUNKED) as llm:
        found = llm.classify(PROMPTS, pooling_params=raw, use_tqdm=False)
        probs = llm.classify(PROMPTS, use_tqdm=False)
        tokens = llm.encode(PROMPTS[3], raw, pooling_task="token_classify", use_tqdm=False)
    np.testing.assert_allclose([o.outputs.probs for o in found], logits, **CLOSE)
    np.testing.assert_allclose(tokens[0].outputs.data[-1], logits[3], **CLOSE)
    assert tokens[0].outputs.data.shape == (len(PROMPTS[3]), 3)
    np.testing.assert_allclose(np.sum([o.outputs.probs for o in probs], axis=-1), 1, rtol=1e-6)


def test_a_decoder_for_one_class_scores_pairs(directory):
    path = checkpoint("llama", "ForSequenceClassification", directory, num_labels=1, pad_token_id=0)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(
        path, dtype=torch.float32
    ).eval()
    pairs = [TOKENIZER.encode("query") + TOKENIZER.encode(text) for text in ("one", "another")]
    with torch.no_grad():
        logits = np.array([model(torch.tensor([ids])).logits.item() for ids in pairs])
    with LLM(str(path), **CHUNKED) as llm:
        found = llm.score("query", ["one", "another"], use_tqdm=False)
    np.testing.assert_allclose([o.outputs.score for o in found], 1 / (1 + np.exp(-logits)), **CLOSE)


@pytest.mark.parametrize(
    ("suffix", "args", "message"),
    [
        ("Model", dict(runner="generate"), "runner='generate'"),
        ("Model", dict(convert="classify"), "convert='classify'"),
        ("Model", dict(pooler_config={"pooling_type": "CLS"}), "'CLS' is not for a decoder"),
        ("Model", dict(enable_lora=True), "enable_lora=True"),
        ("Model", dict(deterministic=True), "deterministic=True"),
    ],
)
def test_decoders_that_cannot_be_had(directory, suffix, args, message):
    with pytest.raises(ValueError, match=message):
        LLM(str(checkpoint("llama", suffix, directory)), **CHUNKED | args)


def test_a_checkpoint_without_its_head_for_classes_is_refused(directory, tmp_path):
    path = tmp_path / "model"
    shutil.copytree(checkpoint("llama", "Model", directory), path)
    config = json.loads((path / "config.json").read_text())
    config["architectures"] = ["LlamaForSequenceClassification"]
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"lacks tensor score\.weight"):
        LLM(str(path), **CHUNKED)
