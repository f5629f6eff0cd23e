"""Karpathy's nanochat: norms without weights everywhere, of the embedded tokens too, and of query and key heads after a
rotation the other way round."""

from __future__ import annotations

from dataclasses import replace

from jaxinfer.models.checkpoint_layout import Names
from jaxinfer.models.family import (
    Config,
    Family,
    config_rope,
    llama_like_spec,
    plain_mlp,
    renamed,
)
from jaxinfer.models.spec import DecoderSpec, NormSpec, QKNormSpec


def spec_from_config(config: Config, max_model_len: int | None) -> DecoderSpec:
    soft_cap = config.get("final_logit_softcapping", 15.0)
    config = renamed(config, {}, hidden_act="relu2", rms_norm_eps=1e-6)
    norm = NormSpec("rms", config["rms_norm_eps"], has_weight=False)
    rope, longest = config_rope(config, max_model_len)
    backwards = replace(rope, inverse_frequencies=tuple(-f for f in rope.inverse_frequencies))
    bias = config.get("attention_bias", False)
    return llama_like_spec(
        config,
        max_model_len,
        attention={
            "qkv_bias": bias,
            "o_bias": bias,
            "qk_norm": QKNormSpec(norm, after_rope=True),
        },
        mlp=plain_mlp(config, bias=False),
        norm=norm,
        ropes=[backwards] * config["num_hidden_layers"],
        max_position_embeddings=longest,
        embed_norm=True,
        logit_soft_cap=soft_cap,
    )


FAMILIES = (
    Family(
        architectures=("NanoChatForCausalLM",),
        spec_from_config=spec_from_config,
        names=Names(up="mlp.fc1", down="mlp.fc2"),
    ),
)
