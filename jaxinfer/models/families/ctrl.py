"""Salesforce's CTRL: sinusoidal positions, and a head with a bias."""

from __future__ import annotations

import math

from jaxinfer.models.checkpoint_layout import Names
from jaxinfer.models.families.gpt2 import GPT_FIELDS
from jaxinfer.models.family import Config, Family, llama_like_spec, plain_mlp, renamed
from jaxinfer.models.spec import DecoderSpec, NormSpec, SinusoidalPositions


def spec_from_config(config: Config, max_model_len: int | None) -> DecoderSpec:
    config = renamed(
        config,
        GPT_FIELDS | {"dff": "intermediate_size"},
        hidden_act="relu",
        layer_norm_epsilon=1e-6,
        tie_word_embeddings=True,
    )
    width = config["hidden_size"]
    frequencies = tuple(10000.0 ** (-2 * i / width) for i in range(width // 2))
    return llama_like_spec(
        config,
        max_model_len,
        attention={"qkv_bias": True, "o_bias": True},
        mlp=plain_mlp(config),
        norm=NormSpec("layer", config["layer_norm_epsilon"], has_bias=True),
        ropes=[None] * config["num_hidden_layers"],
        positions=SinusoidalPositions(frequencies),
        embed_scale=math.sqrt(width),
        head_bias=True,
    )


FAMILIES = (
    Family(
        architectures=("CTRLLMHeadModel",),
        spec_from_config=spec_from_config,
        names=Names(
            prefix="transformer.",
            embed="w",
            norm="layernorm",
            layer="h.{}.",
            qkv=tuple(f"multi_head_attention.W{x}" for x in "qkv"),
            o="multi_head_attention.dense",
            up="ffn.0",
            down="ffn.2",
            attention_norm="layernorm1",
            mlp_norm="layernorm2",
        ),
    ),
)
