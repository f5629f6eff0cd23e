"""Qwen 2 and 2.5: biases on queries, keys and values."""

from __future__ import annotations

from jaxinfer.models.family import (
    Config,
    Family,
    llama_like_spec,
    qwen_windows,
)
from jaxinfer.models.spec import DecoderSpec


def spec_from_config(config: Config, max_model_len: int | None) -> DecoderSpec:
    return llama_like_spec(
        config, max_model_len, windows=qwen_windows(config), attention={"qkv_bias": True}
    )


FAMILIES = (
    Family(
        architectures=("Qwen2ForCausalLM",),
        spec_from_config=spec_from_config,
    ),
)
