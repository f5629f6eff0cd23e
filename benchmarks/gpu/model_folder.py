"""A model's folder with a config and a tokenizer but no weights, as `load_format="dummy"` takes it."""

from __future__ import annotations

import itertools
import json
import string
from pathlib import Path
from typing import Any

from jaxinfer.executor.compile_presets import PRESETS

TINY_LLAMA: dict[str, Any] = {
    **PRESETS["llama-8b"],
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "dtype": "float32",
}


def llama_config(dry: bool) -> dict[str, Any]:
    return TINY_LLAMA if dry else PRESETS["llama-8b"]


def write_model_folder(folder: Path, config: dict[str, Any]) -> Path:
    """`folder`, with one word per token of the vocabulary, so that detokenizing has its usual work."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", **config}))
    letters = itertools.chain.from_iterable(
        itertools.product(string.ascii_lowercase, repeat=n) for n in itertools.count(1)
    )
    words = {
        "Ġ" + "".join(word): i
        for i, word in enumerate(itertools.islice(letters, config["vocab_size"]))
    }
    tokenizer = tokenizers.Tokenizer(models.BPE(words, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder
