"""Swiss AI's Apertus: trained xIELU activations without a gate, and norms of each query and key head."""

from __future__ import annotations

from jaxinfer.models.checkpoint_layout import Names
from jaxinfer.models.family import (
    Config,
    Family,
    llama_like_spec,
    plain_mlp,
    refuse,
    renamed,
    rms_head_norm,
)
from jaxinfer.models.spec import DecoderSpec

_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 12_000_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def spec_from_config(config: Config, max_model_len: int | None) -> DecoderSpec:
    config = renamed(config, {}, hidden_act="xielu", rms_norm_eps=1e-5, rope_theta=12_000_000.0)
    if "rope_scaling" not in config:
        config.setdefault("rope_parameters", _ROPE)
    refuse(config, output_vocab_size=None)
    bias = config.get("attention_bias", False)
    return llama_like_spec(
        config,
        max_model_len,
        attention={
            "qkv_bias": bias,
            "o_bias": bias,
            "qk_norm": rms_head_norm(config["rms_norm_eps"]),
        },
        mlp=plain_mlp(config, bias=False),
    )


FAMILIES = (
    Family(
        architectures=("ApertusForCausalLM", "Apertus1p5TextForCausalLM"),
        spec_from_config=spec_from_config,
        names=Names(attention_norm="attention_layernorm", mlp_norm="feedforward_layernorm"),
    ),
)
