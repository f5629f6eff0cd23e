"""ByteDance's Seed-OSS: Llama with biases on queries, keys and values."""

from __future__ import annotations

from jaxinfer.models.family import Config, Family, llama_like_spec, renamed
from jaxinfer.models.spec import DecoderSpec


def spec_from_config(config: Config, max_model_len: int | None) -> DecoderSpec:
    config = renamed(config, {}, head_dim=128)
    return llama_like_spec(
        config,
        max_model_len,
        attention={
            "qkv_bias": config.get("attention_bias", True),
            "o_bias": config.get("attention_out_bias", False),
        },
        mlp_bias=config.get("mlp_bias", False),
    )


FAMILIES = (Family(architectures=("SeedOssForCausalLM",), spec_from_config=spec_from_config),)
