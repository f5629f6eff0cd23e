"""Tiny random models of the families whose scales are searched, with sizes that groups of 32 divide."""

from __future__ import annotations

import tempfile
from functools import cache
from pathlib import Path
from typing import Any

from jaxinfer.models.functional import FunctionalDecoder
from jaxinfer.models.registry import ModelDescription, describe_model
from jaxinfer.parallel.mesh import make_mesh
from jaxinfer.weights.plan import LoadPlan
from jaxinfer.weights.safetensors import SafetensorsReader
from tests.tiny_checkpoints import randomize
from tests.tiny_llm import TOKENIZER

_COMMON: dict[str, Any] = dict(
    vocab_size=TOKENIZER.vocab_size,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    max_position_embeddings=128,
    bos_token_id=1,
    eos_token_id=2,
    pad_token_id=0,
)
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", dict(tie_word_embeddings=True)),
    "llama_biased": ("Llama", dict(attention_bias=True, mlp_bias=True)),
    "mistral": ("Mistral", dict(sliding_window=7, num_key_value_heads=4)),
    "qwen2": ("Qwen2", dict()),
    "qwen3": ("Qwen3", dict(tie_word_embeddings=True)),
    "uneven": ("Qwen3", dict()),
    "gemma3": (
        "Gemma3Text",
        dict(
            sliding_window=5,
            layer_types=["sliding_attention", "full_attention"],
            query_pre_attn_scalar=24,
        ),
    ),
    "phi3": ("Phi3", dict(head_dim=None)),
    "olmo2": ("Olmo2", dict(head_dim=None)),
    "gpt2": ("GPT2", dict(n_embd=64, n_head=4, n_layer=1, n_inner=96)),
    "mixtral": ("Mixtral", dict(num_local_experts=4)),
    "mamba": ("Mamba", dict(state_size=4, num_hidden_layers=1)),
}
"""By name: the prefix of the transformers classes, and what differs from the common config."""


@cache
def tiny_dir(name: str) -> Path:
    """Directory of the float32 checkpoint `name` with the tokenizer of `tests.tiny_llm`; written once per process."""
    directory = Path(_session_directory().name) / name
    make_model(name).save_pretrained(directory)
    TOKENIZER.save(directory)
    return directory


def make_model(name: str) -> Any:
    """As a transformers model in evaluation mode, the same weights every time."""
    import transformers

    prefix, changes = CONFIGS[name]
    given = {key: value for key, value in (_COMMON | changes).items() if value is not None}
    config = getattr(transformers, f"{prefix}Config")(**given)
    config._attn_implementation = "eager"
    classes = {"Gemma3Text": "Gemma3ForCausalLM", "GPT2": "GPT2LMHeadModel"}
    model_class = getattr(transformers, classes.get(prefix, f"{prefix}ForCausalLM"))
    model = randomize(model_class(config)).eval()
    if name == "uneven":
        _make_uneven(model)
    return model


def _make_uneven(model: Any) -> None:
    """Some channels of what the norms give are much larger than others, as in trained models."""
    import torch

    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for key, weight in model.named_parameters():
            if key.endswith("layernorm.weight"):
                weight.mul_(torch.exp(1.3 * torch.randn(weight.shape, generator=generator)))


def opened(directory: Path) -> tuple[SafetensorsReader, ModelDescription, LoadPlan]:
    reader = SafetensorsReader(directory)
    description = describe_model(reader.config())
    decoder = FunctionalDecoder.create(description.spec, make_mesh(1), "float32")
    return reader, description, description.checkpoint_plan(decoder.dims, reader.names())


@cache
def _session_directory() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="tiny-quantize-")
