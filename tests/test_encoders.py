"""Encoders against transformers, through `LLM`: embeddings and classes."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
import torch

from jaxinfer import LLM, PoolingParams
from jaxinfer.weights.sentence_transformers import read_sentence_transformers
from tests.tiny_encoders import (
    ENCODERS,
    MAX_LEN,
    TOKENIZER,
    class_logits,
    hidden_states,
    tiny_encoder,
    token_logits,
    with_sentence_transformers,
)

TEXTS = ["a", "three words", "x" * 40, "hello", "the last one", "b c"]
CLOSE = dict(rtol=0, atol=1e-4)


def engine(path, **args) -> LLM:
    args = dict(dtype="float32", max_num_seqs=4, max_num_batched_tokens=48) | args
    return LLM(str(path), **args)


def embeddings(llm, prompts, **args) -> np.ndarray:
    return np.array(
        [o.outputs.embedding for o in llm.embed(prompts, use_tqdm=False, **args)], np.float32
    )


def unit(x) -> np.ndarray:
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


@pytest.fixture(scope="module")
def bert():
    with engine(tiny_encoder("Bert"), pooler_config={"pooling_type": "MEAN"}) as llm:
        yield llm


@pytest.mark.parametrize("name", ENCODERS)
def test_hidden_states_are_those_of_transformers(name):
    path = tiny_encoder(name)
    raw = PoolingParams(use_activation=False)
    with engine(path) as llm:
        # Prompts longer than a step's tokens come in chunks, and of like lengths together.
        first = embeddings(llm, TEXTS, pooling_params=raw)
        every = llm.encode(TEXTS, use_tqdm=False, pooling_task="token_embed")
        longest = "z" * (MAX_LEN - 2)
        assert len(embeddings(llm, longest)) == 1
    expected = [hidden_states(path, text) for text in TEXTS]
    np.testing.assert_allclose(first, [states[0] for states in expected], **CLOSE)
    for output, states in zip(every, expected, strict=True):
        np.testing.assert_allclose(output.outputs.data, states, **CLOSE)


def test_embeddings_are_pooled_as_they_are_asked_to_be_and_normalised(bert):
    path = tiny_encoder("Bert")
    expected = [hidden_states(path, text).mean(0) for text in TEXTS]
    np.testing.assert_allclose(embeddings(bert, TEXTS), unit(np.array(expected)), **CLOSE)
    with engine(path, pooler_config={"pooling_type": "LAST"}) as llm:
        expected = [unit(hidden_states(path, text)[-1]) for text in TEXTS]
        np.testing.assert_allclose(embeddings(llm, TEXTS), expected, **CLOSE)


def test_prompts_come_in_every_form_and_keep_their_order(bert):
    ids = TOKENIZER("three words")["input_ids"]
    forms = ["three words", ids, {"prompt_token_ids": ids}, {"prompt": TEXTS[1]}]
    found = embeddings(bert, forms)
    np.testing.assert_allclose(found, [found[0]] * 4, rtol=0, atol=1e-6)
    assert bert.embed(ids, use_tqdm=False)[0].prompt_token_ids == ids
    assert bert.embed([], use_tqdm=False) == []


def test_an_encoder_in_bfloat16_is_near(bert):
    with engine(
        tiny_encoder("Bert"), dtype="bfloat16", pooler_config={"pooling_type": "MEAN"}
    ) as llm:
        cosine = (embeddings(llm, TEXTS) * embeddings(bert, TEXTS)).sum(-1)
    assert cosine.min() > 0.999


def test_long_prompts_are_refused_or_cut(bert):
    long = "y" * 100
    with pytest.raises(ValueError, match=rf"102 tokens; max_model_len is {MAX_LEN}"):
        bert.embed(long, use_tqdm=False)
    [cut] = bert.embed(long, use_tqdm=False, truncate_prompt_tokens=10)
    expected = TOKENIZER(long, truncation=True, max_length=10)["input_ids"]
    assert cut.prompt_token_ids == expected and len(expected) == 10
    [cut] = bert.embed(long, use_tqdm=False, truncate_prompt_tokens=-1)
    assert len(cut.prompt_token_ids) == MAX_LEN
    [cut] = bert.embed(list(range(4, 24)), use_tqdm=False, truncate_prompt_tokens=3)
    assert cut.prompt_token_ids == [21, 22, 23]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda llm: llm.embed("", use_tqdm=False), "prompt must not be empty"),
        (lambda llm: llm.embed([], pooling_params=1, use_tqdm=False), "pooling_params"),
        (lambda llm: llm.embed(["a", [10**6]], use_tqdm=False), r"prompt 1: .*1000000"),
        (lambda llm: llm.embed("a\ud800", use_tqdm=False), "lone surrogate"),
        (lambda llm: llm.classify("a", use_tqdm=False), "task 'classify'.*embed, token_embed"),
        (lambda llm: llm.generate("a", use_tqdm=False), "makes vectors: embed"),
        (lambda llm: PoolingParams(truncate_prompt_tokens=0), "truncate_prompt_tokens"),
        (lambda llm: PoolingParams(dimensions=0), "dimensions must be at least 1"),
        (lambda llm: PoolingParams(task="sing"), "task must be one of"),
        (
            lambda llm: llm.embed("a", truncate_prompt_tokens=1000, use_tqdm=False),
            "at most max_model_len",
        ),
        (lambda llm: llm.embed("a", truncate_prompt_tokens=2, use_tqdm=False), "no room"),
        (
            lambda llm: llm.embed("a", pooling_params=PoolingParams(dimensions=8), use_tqdm=False),
            "not made for Matryoshka",
        ),
    ],
)
def test_what_cannot_be_done_is_refused_and_the_engine_goes_on(bert, call, message):
    with pytest.raises(ValueError, match=message):
        call(bert)
    assert np.isfinite(embeddings(bert, "a")).all()


def test_matryoshka_models_give_shorter_embeddings():
    path = tiny_encoder("Bert", matryoshka_dimensions=(8, 16))
    with engine(path, pooler_config={"pooling_type": "MEAN"}) as llm:
        found = embeddings(llm, "hello", pooling_params=PoolingParams(dimensions=8))
        with pytest.raises(ValueError, match="dimensions must be one of 8, 16, got 12"):
            llm.embed("hello", pooling_params=PoolingParams(dimensions=12))
    expected = unit(hidden_states(path, "hello").mean(0)[:8])
    np.testing.assert_allclose(found[0], expected, **CLOSE)


def test_how_to_pool_is_read_from_the_files_of_sentence_transformers(tmp_path):
    path = tmp_path / "model"
    shutil.copytree(tiny_encoder("Bert"), path)
    with_sentence_transformers(path, "mean_tokens", normalize=False, max_seq_length=20)
    with engine(path) as llm:
        assert llm.config.model.max_model_len == 20
        found = embeddings(llm, "hello")
        with pytest.raises(ValueError, match="max_model_len is 20"):
            llm.embed("y" * 30)
    np.testing.assert_allclose(found[0], hidden_states(path, "hello").mean(0), **CLOSE)
    with_sentence_transformers(path, "lasttoken", normalize=True)
    files = read_sentence_transformers(path)
    assert (files.pooling_type, files.normalize, files.max_seq_length) == ("LAST", True, None)
    with_sentence_transformers(path, "max_tokens", normalize=True)
    with pytest.raises(ValueError, match="pooling_mode_max_tokens is not supported"):
        engine(path)
    (path / "modules.json").write_text(json.dumps([{"type": "x.Dense", "path": "2_Dense"}]))
    with pytest.raises(ValueError, match="module Dense, which is not supported"):
        engine(path)


@pytest.mark.parametrize("name", ENCODERS)
def test_classes_are_those_of_transformers(name):
    path = tiny_encoder(name, "ForSequenceClassification", num_labels=3)
    expected = np.array([class_logits(path, text) for text in TEXTS])
    with engine(path) as llm:
        raw = PoolingParams(use_activation=False)
        logits = [o.outputs.probs for o in llm.classify(TEXTS, pooling_params=raw, use_tqdm=False)]
        probs = [o.outputs.probs for o in llm.classify(TEXTS, use_tqdm=False)]
        with pytest.raises(ValueError, match="3 classes"):
            llm.score("a", "b")
    np.testing.assert_allclose(logits, expected, **CLOSE)
    softmax = torch.softmax(torch.tensor(expected), -1).numpy()
    np.testing.assert_allclose(probs, softmax, **CLOSE)


def test_every_token_has_its_classes():
    path = tiny_encoder("Bert", "ForTokenClassification", num_labels=4)
    raw = PoolingParams(use_activation=False)
    with engine(path) as llm:
        outputs = llm.encode(TEXTS, raw, use_tqdm=False)
    for text, output in zip(TEXTS, outputs, strict=True):
        np.testing.assert_allclose(output.outputs.data, token_logits(path, text), **CLOSE)


@pytest.mark.parametrize("name", ENCODERS)
def test_a_cross_encoder_reads_both_texts(name):
    path = tiny_encoder(name, "ForSequenceClassification", num_labels=1)
    with engine(path) as llm:
        found = [o.outputs.score for o in llm.score("query", TEXTS, use_tqdm=False)]
        cut = llm.score("query" * 20, "z" * 10, truncate_prompt_tokens=40, use_tqdm=False)
    logits = np.array([class_logits(path, "query", text)[0] for text in TEXTS])
    np.testing.assert_allclose(found, 1 / (1 + np.exp(-logits)), **CLOSE)
    expected = TOKENIZER("query" * 20, "z" * 10, truncation=True, max_length=40)["input_ids"]
    assert cut[0].prompt_token_ids == expected


def test_a_model_for_embeddings_scores_by_their_cosine(bert):
    path = tiny_encoder("Bert")
    vectors = [unit(hidden_states(path, text).mean(0)) for text in TEXTS]
    found = [o.outputs.score for o in bert.score(TEXTS[0], TEXTS[1:], use_tqdm=False)]
    np.testing.assert_allclose(found, [vectors[0] @ v for v in vectors[1:]], **CLOSE)
    found = [o.outputs.score for o in bert.score(TEXTS[:3], TEXTS[3:], use_tqdm=False)]
    pairs = zip(vectors[:3], vectors[3:], strict=True)
    np.testing.assert_allclose(found, [a @ b for a, b in pairs], **CLOSE)
    with pytest.raises(ValueError, match="data_1 must be one text or as many as data_2"):
        bert.score(TEXTS[:2], TEXTS[:3])


def test_an_encoder_that_sleeps_forgets_nothing(bert):
    before = embeddings(bert, TEXTS)
    for level in (1, 2):
        bert.sleep(level)
        with pytest.raises(ValueError, match="sleeps"):
            bert.embed("a", use_tqdm=False)
        bert.wake_up()
        np.testing.assert_array_equal(embeddings(bert, TEXTS), before)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (dict(runner="generate"), "runner='generate'"),
        (dict(convert="classify"), "convert='classify'"),
        (dict(pooler_config={"pooling_type": "MAX"}), "pooling_type must be one of"),
        (dict(pooler_config={"colour": 1}), "no 'colour'"),
        (dict(enable_prefix_caching=True), "enable_prefix_caching=True"),
        (dict(speculative_config={"method": "ngram"}), "speculative_config"),
        (dict(quantization="awq"), "quantization='awq'"),
        (dict(tensor_parallel_size=2), "tensor_parallel_size must be 1"),
        (dict(max_model_len=1000), "positions end at 64"),
        (dict(hf_overrides={"position_embedding_type": "relative_key"}), "relative_key"),
    ],
)
def test_engines_that_cannot_be_had_of_an_encoder(args, message):
    with pytest.raises(ValueError, match=message):
        engine(tiny_encoder("Bert"), **args)


def test_nothing_compiles_after_the_warm_up():
    with engine(tiny_encoder("Bert"), warmup="all", max_num_seqs=2, max_model_len=24) as llm:
        embeddings(llm, ["a", "hello", "the last one, longer", "b", "c"])
        counts = [m.value for m in llm.get_metrics() if m.name == "jaxinfer:num_compilations"]
        assert llm._client._core._executor.num_compilations == 0 and sum(counts) == 0


@pytest.mark.real
def test_real_embeddings_point_where_transformers_do(minilm_dir):
    import transformers

    rng = np.random.default_rng(0)
    words = (minilm_dir / "vocab.txt").read_text().split()[2000:12000]
    texts = [" ".join(rng.choice(words, n)) for n in rng.integers(1, 40, 200)]
    tokenizer = transformers.AutoTokenizer.from_pretrained(minilm_dir)
    model = transformers.AutoModel.from_pretrained(minilm_dir).eval()
    expected = []
    with torch.no_grad():
        for start in range(0, len(texts), 20):
            batch = tokenizer(texts[start : start + 20], return_tensors="pt", padding=True)
            mask = batch["attention_mask"][..., None]
            mean = (model(**batch).last_hidden_state * mask).sum(1) / mask.sum(1)
            expected.append(unit(mean.numpy()))
    with LLM("all-minilm-l6-v2") as llm:
        found = embeddings(llm, texts)
    assert (found * np.concatenate(expected)).sum(-1).min() > 0.9999
