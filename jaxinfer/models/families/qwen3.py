"""Qwen 3: norms on query and key heads."""

from __future__ import annotations

from jaxinfer.models.checkpoint_layout import decoder_plan
from jaxinfer.models.family import (
    Config,
    Family,
    llama_like_spec,
    qwen_windows,
)
from jaxinfer.models.spec import DecoderSpec


def spec_from_config(config: Config, max_model_len: int | None) -> DecoderSpec:
    attention_bias = config.get("attention_bias", False)
    return llama_like_spec(
        {"head_dim": 128, **config},
        max_model_len,
        windows=qwen_windows(config),
        qkv_bias=attention_bias,
        o_bias=attention_bias,
        qk_norm=True,
    )


FAMILY = Family(
    architectures=("Qwen3ForCausalLM",),
    spec_from_config=spec_from_config,
    checkpoint_plan=lambda config, spec, dims: decoder_plan(spec, dims),
)
