"""Qwen 3: norms on query and key heads."""

from __future__ import annotations

from jaxinfer.models.family import (
    Config,
    Family,
    llama_like_spec,
    qwen_windows,
    rms_head_norm,
)
from jaxinfer.models.spec import DecoderSpec


def spec_from_config(config: Config, max_model_len: int | None) -> DecoderSpec:
    attention_bias = config.get("attention_bias", False)
    return llama_like_spec(
        {"head_dim": 128, **config},
        max_model_len,
        windows=qwen_windows(config),
        attention={
            "qkv_bias": attention_bias,
            "o_bias": attention_bias,
            "qk_norm": rms_head_norm(config.get("rms_norm_eps", 1e-6)),
        },
    )


FAMILIES = (
    Family(
        architectures=("Qwen3ForCausalLM",),
        spec_from_config=spec_from_config,
    ),
)
