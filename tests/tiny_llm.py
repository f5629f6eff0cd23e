"""A tiny random checkpoint with a tokenizer of one token per character, for `LLM` and `AsyncLLM` over the real
executor, and what transformers makes of it."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import numpy as np
import tokenizers
import torch
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from jaxinfer.frontend.tokenizer import Tokenizer
from tests.tiny_checkpoints import tiny_checkpoint, tiny_model

NAME = "llama_biased"
"""Its head is not tied to the embedding: what spoils one token's embedding does not spoil every logit."""
PAD, BOS, EOS = range(3)
_SPECIAL = ["<pad>", "<s>", "</s>"]
_CHARACTERS = ["Ġ", *map(chr, range(ord("!"), ord("~")))]
VOCAB = len(_SPECIAL) + len(_CHARACTERS)

MAX_LEN = 48
SMALL = dict(max_model_len=MAX_LEN, block_size=4, max_num_seqs=4, max_num_batched_tokens=16)
"""Engine arguments that need few programs; engines with the same ones share them through the compilation cache."""

type Rule = Callable[[np.ndarray, list[int], list[int]], np.ndarray]
"""From raw logits [V], prompt and output so far to what the argmax is taken of."""


def _tokenizer() -> Tokenizer:
    vocab = {piece: i for i, piece in enumerate([*_SPECIAL, *_CHARACTERS])}
    backend = tokenizers.Tokenizer(models.BPE(vocab, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(piece, special=True) for piece in _SPECIAL])
    return Tokenizer(backend, {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"})


TOKENIZER = _tokenizer()
assert TOKENIZER.vocab_size == VOCAB


def ids(text: str) -> list[int]:
    return TOKENIZER.encode(text)


@cache
def tiny_llm_dir() -> Path:
    """Directory of the checkpoint with its tokenizer; written once per process, not to be changed."""
    return copy_of_tiny_llm(Path(_session_directory().name) / "model")


def copy_of_tiny_llm(directory: Path) -> Path:
    """A copy of one's own, in a directory that does not exist yet."""
    shutil.copytree(tiny_checkpoint(NAME), directory)
    TOKENIZER.save(directory)
    return directory


def oracle_logits(token_ids: Sequence[int]) -> np.ndarray:
    """transformers' [len(token_ids), V], in float64."""
    with torch.no_grad():
        return tiny_model(NAME)(torch.tensor([list(token_ids)])).logits[0].double().numpy()


def oracle_greedy(prompt: Sequence[int], num_tokens: int, rule: Rule | None = None) -> list[int]:
    """The likeliest tokens by transformers' logits after `rule`; end-of-sequence tokens end nothing."""
    prompt, output = list(prompt), []
    while len(output) < num_tokens:
        logits = oracle_logits(prompt + output)[-1]
        if rule is not None:
            logits = rule(logits, prompt, output)
        second, best = np.sort(logits)[-2:]
        assert best - second > 1e-4, "a near tie: this prompt is no test"
        output.append(int(logits.argmax()))
    return output


@cache
def _session_directory() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="tiny-llm-")
