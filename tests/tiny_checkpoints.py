"""Tiny random checkpoints of some families, written by transformers, whose weights exercise what real configs use:
windows shorter than a prompt, scaled rotations, biases, norm weights that are not one, sizes that no mesh divides."""

from __future__ import annotations

import tempfile
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

from tests.models.architectures.dense import LLAMA3, YARN
from tests.models.architectures.entry import COMMON

CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": (
        "Llama",
        dict(
            num_attention_heads=6,
            num_key_value_heads=3,
            tie_word_embeddings=True,
            rope_parameters=LLAMA3,
        ),
    ),
    "llama_biased": (
        "Llama",
        dict(
            num_key_value_heads=4,
            head_dim=16,
            attention_bias=True,
            mlp_bias=True,
            rope_parameters=dict(rope_type="linear", rope_theta=5000.0, factor=2.0),
        ),
    ),
    "mistral": ("Mistral", dict(sliding_window=7, head_dim=16)),
    "qwen2": (
        "Qwen2",
        dict(use_sliding_window=True, sliding_window=9, max_window_layers=1, rope_parameters=YARN),
    ),
    "qwen3": (
        "Qwen3",
        dict(
            head_dim=16,
            tie_word_embeddings=True,
            use_sliding_window=True,
            sliding_window=6,
            layer_types=["sliding_attention", "full_attention", "sliding_attention"],
            rope_parameters=dict(rope_type="default", rope_theta=1000.0),
        ),
    ),
    "gemma3": (
        "Gemma3Text",
        dict(
            num_key_value_heads=1,
            head_dim=16,
            query_pre_attn_scalar=24,
            sliding_window=5,
            layer_types=["sliding_attention", "sliding_attention", "full_attention"],
            final_logit_softcapping=3.0,
            rope_parameters=dict(
                full_attention=dict(rope_type="linear", rope_theta=100000.0, factor=8.0),
                sliding_attention=dict(rope_type="default", rope_theta=1000.0),
            ),
        ),
    ),
}
"""By name: the prefix of the transformers classes, and what differs from the common tiny config."""


@cache
def tiny_checkpoint(name: str) -> Path:
    """Directory of the float32 checkpoint `name`, one of `CONFIGS`; written once per process."""
    model = tiny_model(name)
    directory = Path(_session_directory().name) / name
    model.save_pretrained(directory)
    return directory


@cache
def tiny_model(name: str) -> Any:
    """The same as a transformers model in evaluation mode."""
    import transformers

    prefix, changes = CONFIGS[name]
    config = getattr(transformers, f"{prefix}Config")(
        **deepcopy(COMMON | changes)
    )  # completed in place
    config._attn_implementation = "eager"
    model_class = getattr(transformers, prefix.removesuffix("Text") + "ForCausalLM")
    return randomize(model_class(config)).eval()


def randomize(model: Any) -> Any:
    """Fill a transformers model with weights that leave no feature idle and keep activations of order one."""
    import torch

    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            noise = torch.randn(weight.shape, generator=generator)
            if "norm" in name:
                weight.add_(0.3 * noise)
            elif name.endswith("bias"):
                weight.copy_(0.3 * noise)
            elif "embed" in name:
                # Scaled embeddings would drown what the layers add, and a tied head repeat its input.
                weight.copy_((0.06 if "gemma" in model.config.model_type else 0.4) * noise)
            else:
                weight.copy_(1.5 * noise / weight.shape[-1] ** 0.5)
    return model


@cache
def _session_directory() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="tiny-checkpoints-")
