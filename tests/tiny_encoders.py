"""Tiny random encoders with a tokenizer of one token per character, and what transformers makes of them."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
PAD, UNK, CLS, SEP = range(4)
CHARACTERS = [chr(c) for c in range(ord(" "), ord("~"))]
VOCAB = len(SPECIAL) + len(CHARACTERS)
MAX_LEN = 64

_COMMON = dict(vocab_size=VOCAB, initializer_range=0.3)
_BERT = dict(
    hidden_size=24,
    num_hidden_layers=2,
    num_attention_heads=3,
    intermediate_size=40,
    max_position_embeddings=MAX_LEN,
    pad_token_id=PAD,
)
_ROBERTA = _BERT | dict(max_position_embeddings=MAX_LEN + 6, pad_token_id=5, type_vocab_size=1)
_DISTILBERT = dict(
    dim=24, n_layers=2, n_heads=3, hidden_dim=40, max_position_embeddings=MAX_LEN, activation="relu"
)
ENCODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "Bert": ("Bert", _BERT),
    "Roberta": ("Roberta", _ROBERTA),
    "XLMRoberta": ("XLMRoberta", _ROBERTA | dict(hidden_act="gelu_new")),
    "DistilBert": ("DistilBert", _DISTILBERT),
}
_directory = tempfile.TemporaryDirectory(prefix="tiny-encoders-")


def _tokenizer() -> Tokenizer:
    vocab = {piece: i for i, piece in enumerate([*SPECIAL, *CHARACTERS])}
    backend = Tokenizer(models.WordLevel(vocab, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    backend.add_special_tokens(SPECIAL)
    backend.post_processor = processors.BertProcessing(("[SEP]", SEP), ("[CLS]", CLS))
    return backend


TOKENIZER = PreTrainedTokenizerFast(
    tokenizer_object=_tokenizer(), pad_token="[PAD]", cls_token="[CLS]", sep_token="[SEP]"
)


@cache
def tiny_encoder(name: str, suffix: str = "Model", **config: Any) -> Path:
    """The checkpoint's directory; written once per process, not to be changed."""
    kind, fields = ENCODERS[name]
    number = len(list(Path(_directory.name).iterdir()))
    path = Path(_directory.name) / f"{name}{suffix}{number}"
    made = getattr(transformers, f"{kind}Config")(**_COMMON, **fields, **config)
    torch.manual_seed(number)
    model = getattr(transformers, f"{kind}{suffix}")(made)
    with torch.no_grad():
        for tensor in model.parameters():
            if tensor.ndim == 1:  # norms and biases that do something
                tensor.add_(0.3 * torch.randn_like(tensor))
    model.save_pretrained(path)
    TOKENIZER.save_pretrained(path)
    return path


def with_sentence_transformers(path: Path, mode: str, *, normalize: bool, **more: Any) -> Path:
    """The checkpoint as sentence-transformers writes it: pooling `mode`, and `more` of its sentence_bert_config.json."""
    kinds = [("", "Transformer"), ("1_Pooling", "Pooling")]
    kinds += [("2_Normalize", "Normalize")] if normalize else []
    modules = [
        {"idx": i, "path": where, "type": f"sentence_transformers.models.{kind}"}
        for i, (where, kind) in enumerate(kinds)
    ]
    (path / "1_Pooling").mkdir(exist_ok=True)
    names = ("cls_token", "mean_tokens", "max_tokens", "lasttoken")
    pooling = {f"pooling_mode_{name}": name == mode for name in names}
    for file, value in (
        ("modules.json", modules),
        ("1_Pooling/config.json", pooling),
        ("sentence_bert_config.json", more),
    ):
        (path / file).write_text(json.dumps(value))
    return path


@cache
def _model(path: Path, auto: str):
    return getattr(transformers, auto).from_pretrained(path, dtype=torch.float32).eval()


def hidden_states(path: Path, *texts: str | Sequence[str]) -> np.ndarray:
    """[T, E] of one text, or of a pair."""
    batch = TOKENIZER(*texts, return_tensors="pt", return_token_type_ids=True)
    return _run(path, "AutoModel", batch).last_hidden_state[0].numpy()


def class_logits(path: Path, *texts: str) -> np.ndarray:
    """[C] of one text, or of a pair."""
    batch = TOKENIZER(*texts, return_tensors="pt", return_token_type_ids=True)
    return _run(path, "AutoModelForSequenceClassification", batch).logits[0].numpy()


def token_logits(path: Path, text: str) -> np.ndarray:
    batch = TOKENIZER(text, return_tensors="pt")
    return _run(path, "AutoModelForTokenClassification", batch).logits[0].numpy()


def _run(path: Path, auto: str, batch):
    model = _model(path, auto)
    if "DistilBert" in type(model).__name__ or "oberta" in type(model).__name__:
        batch.pop("token_type_ids", None)
    with torch.no_grad():
        return model(**batch)
