"""Gemma 3 (text): norms around attention and MLP, and layers with a sliding window and rotation of their own."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from jaxinfer.models.checkpoint_layout import Names
from jaxinfer.models.family import (
    Config,
    Family,
    activation,
    layer_type_ropes,
    sliding_windows,
)
from jaxinfer.models.spec import (
    AttentionSpec,
    DecoderSpec,
    GatedMlpSpec,
    LayerSpec,
    NormSpec,
    QKNormSpec,
)

_DEFAULTS: dict[str, Any] = {
    "vocab_size": 262_208,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-6,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "sliding_window_pattern": 6,
    "tie_word_embeddings": True,
    "rope_theta": 1_000_000.0,
    "rope_local_base_freq": 10_000.0,
}
"""What published configs leave out."""


def spec_from_config(config: Config, max_model_len: int | None) -> DecoderSpec:
    config = {**_DEFAULTS, **config.get("text_config", config)}
    for name in ("attn_logit_softcapping", "use_bidirectional_attention"):
        if config.get(name):
            raise ValueError(f"{name} ({config[name]}) is not supported for gemma3.")
    pattern = config["sliding_window_pattern"]
    every = [
        None if (i + 1) % pattern == 0 else config["sliding_window"]
        for i in range(config["num_hidden_layers"])
    ]
    windows = sliding_windows(config, every)
    attention_bias = config.get("attention_bias", False)
    norm = NormSpec("rms", config["rms_norm_eps"], weight_offset=1.0)
    attention = AttentionSpec(
        num_heads=config["num_attention_heads"],
        num_kv_heads=config["num_key_value_heads"],
        head_dim=config["head_dim"],
        query_scale=config["query_pre_attn_scalar"] ** -0.5,
        rope=None,
        qk_norm=QKNormSpec(norm),
        qkv_bias=attention_bias,
        o_bias=attention_bias,
    )
    mlp = GatedMlpSpec(
        config["intermediate_size"], activation(config, "hidden_activation", "gelu_pytorch_tanh")
    )
    return DecoderSpec(
        vocab_size=config["vocab_size"],
        max_position_embeddings=config["max_position_embeddings"],
        embed_dim=config["hidden_size"],
        layers=tuple(
            LayerSpec(replace(attention, rope=rope, sliding_window=window), mlp, norms="both")
            for rope, window in zip(
                layer_type_ropes(config, max_model_len, windows), windows, strict=True
            )
        ),
        norm=norm,
        tied_head=config["tie_word_embeddings"],
        embed_scale=config["hidden_size"] ** 0.5,
        logit_soft_cap=config.get("final_logit_softcapping"),
    )


def _names(config: Config) -> Names:
    text = "language_model." if "text_config" in config else ""
    return Names(
        prefix=f"{text}model.", head=f"{text}lm_head", mlp_norm="pre_feedforward_layernorm"
    )


FAMILIES = (
    Family(
        architectures=("Gemma3ForCausalLM", "Gemma3ForConditionalGeneration"),
        spec_from_config=spec_from_config,
        names=_names,
        other_tensors=(r"vision_tower\..*", r"multi_modal_projector\..*"),
    ),
)
