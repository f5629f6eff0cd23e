"""Llama 1 to 3 and the many models published in its form."""

from __future__ import annotations

from jaxinfer.models.family import Config, Family, llama_like_spec
from jaxinfer.models.spec import DecoderSpec


def spec_from_config(config: Config, max_model_len: int | None) -> DecoderSpec:
    attention_bias = config.get("attention_bias", False)
    return llama_like_spec(
        config,
        max_model_len,
        attention={"qkv_bias": attention_bias, "o_bias": attention_bias},
        mlp_bias=config.get("mlp_bias", False),
    )


FAMILIES = (
    Family(
        architectures=("LlamaForCausalLM",),
        spec_from_config=spec_from_config,
    ),
)
