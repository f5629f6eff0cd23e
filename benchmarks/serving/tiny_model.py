"""A two-layer Llama of width 64 with random weights, as a Hugging Face directory that every engine reads.

What is left of a server's time with it is the serving path. Its tokens are short words of ASCII letters, so that engines
decode the same text from them however they treat broken characters; the rest of the byte alphabet is there for prompts,
and greedy decoding never picks it.
"""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from string import ascii_lowercase

import numpy as np
import tokenizers
from safetensors.numpy import save_file
from tokenizers import decoders, models, pre_tokenizers

WIDTH, MLP_WIDTH, NUM_LAYERS, NUM_HEADS = 64, 128, 2, 2
NUM_WORDS = 3840
NAME = "tiny"
_END = "<|end|>"
_TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def write_tiny_model(directory: Path, max_model_len: int = 4096) -> Path:
    """Returns `directory`, written unless it holds the model already. The same weights everywhere."""
    if (directory / "tokenizer_config.json").is_file():
        return directory
    directory.mkdir(parents=True, exist_ok=True)
    vocab = _vocabulary()
    backend = tokenizers.Tokenizer(models.BPE(vocab, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([_END])
    backend.save(str(directory / "tokenizer.json"))
    _write_json(
        directory / "config.json",
        {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": WIDTH,
            "intermediate_size": MLP_WIDTH,
            "num_hidden_layers": NUM_LAYERS,
            "num_attention_heads": NUM_HEADS,
            "num_key_value_heads": NUM_HEADS,
            "head_dim": WIDTH // NUM_HEADS,
            "hidden_act": "silu",
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "max_position_embeddings": max_model_len,
            "vocab_size": len(vocab) + 1,
            "eos_token_id": len(vocab),
            "tie_word_embeddings": False,
            "torch_dtype": "float32",
        },
    )
    save_file(_weights(len(vocab) + 1), str(directory / "model.safetensors"), {"format": "pt"})
    _write_json(
        directory / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": _END,
            "chat_template": _TEMPLATE,
            "model_max_length": max_model_len,
        },
    )
    return directory


def _vocabulary() -> dict[str, int]:
    """Words of three letters, some with a space before them, then the single bytes."""
    triples = ("".join(letters) for letters in product(ascii_lowercase, repeat=3))
    words = ["Ġ" * (i % 4 == 0) + word for i, word in zip(range(NUM_WORDS), triples, strict=False)]
    return {
        token: i for i, token in enumerate([*words, *sorted(pre_tokenizers.ByteLevel.alphabet())])
    }


def _weights(vocab_size: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)

    def normal(*shape: int) -> np.ndarray:
        return (rng.standard_normal(shape) / np.sqrt(shape[-1])).astype(np.float32)

    ones = np.ones(WIDTH, np.float32)
    head = normal(vocab_size, WIDTH)
    head[NUM_WORDS:] = 0  # some word is always likelier
    tensors = {
        "model.embed_tokens.weight": normal(vocab_size, WIDTH),
        "model.norm.weight": ones,
        "lm_head.weight": head,
    }
    for i in range(NUM_LAYERS):
        layer = f"model.layers.{i}"
        for name in "qkvo":
            tensors[f"{layer}.self_attn.{name}_proj.weight"] = normal(WIDTH, WIDTH)
        for name in ("gate", "up"):
            tensors[f"{layer}.mlp.{name}_proj.weight"] = normal(MLP_WIDTH, WIDTH)
        tensors[f"{layer}.mlp.down_proj.weight"] = normal(WIDTH, MLP_WIDTH)
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{layer}.{name}.weight"] = ones
    return tensors


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
