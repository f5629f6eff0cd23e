"""Gemma 3 (text): norms around attention and MLP, and layers with a sliding window and rotation of their own."""

from __future__ import annotations

from typing import Any

from jaxinfer.models.checkpoint_layout import NormNames, decoder_plan
from jaxinfer.models.family import (
    Config,
    Family,
    activation,
    sliding_windows,
)
from jaxinfer.models.rope_config import complete_rope_parameters, rope_spec
from jaxinfer.models.sharded_dims import ShardedDims
from jaxinfer.models.spec import AttentionSpec, DecoderSpec, RopeSpec
from jaxinfer.weights.plan import LoadPlan

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
    full, sliding = _ropes(config, max_model_len)
    attention_bias = config.get("attention_bias", False)
    return DecoderSpec(
        vocab_size=config["vocab_size"],
        max_position_embeddings=config["max_position_embeddings"],
        embed_dim=config["hidden_size"],
        num_heads=config["num_attention_heads"],
        num_kv_heads=config["num_key_value_heads"],
        head_dim=config["head_dim"],
        mlp_dim=config["intermediate_size"],
        layers=tuple(
            AttentionSpec(full if window is None else sliding, window)
            for window in sliding_windows(config, every)
        ),
        activation=activation(config, "hidden_activation", "gelu_pytorch_tanh"),
        norm_eps=config["rms_norm_eps"],
        query_scale=config["query_pre_attn_scalar"] ** -0.5,
        tied_head=config["tie_word_embeddings"],
        qkv_bias=attention_bias,
        o_bias=attention_bias,
        qk_norm=True,
        norm_weight_offset=1.0,
        post_norms=True,
        embed_scale=config["hidden_size"] ** 0.5,
        logit_soft_cap=config.get("final_logit_softcapping"),
    )


def _ropes(config: Config, max_model_len: int | None) -> tuple[RopeSpec, RopeSpec]:
    """Rotations of full and of sliding layers. The older form scales the full layers only."""
    positions = config["max_position_embeddings"]
    by_type = config.get("rope_parameters") or {
        "full_attention": config.get("rope_scaling"),
        "sliding_attention": None,
    }
    thetas = {
        "full_attention": config["rope_theta"],
        "sliding_attention": config["rope_local_base_freq"],
    }
    full, sliding = (
        rope_spec(
            complete_rope_parameters(config, by_type.get(kind) or {}, theta),
            config["head_dim"],
            positions,
            max_model_len or positions,
        )
        for kind, theta in thetas.items()
    )
    return full, sliding


def _is_multimodal(config: Config) -> bool:
    return "text_config" in config


def checkpoint_plan(config: Config, spec: DecoderSpec, dims: ShardedDims) -> LoadPlan:
    text = "language_model." if _is_multimodal(config) else ""
    norms = NormNames(mlp="pre_feedforward_layernorm")
    return decoder_plan(
        spec, dims, prefix=f"{text}model.", head=f"{text}lm_head.weight", norms=norms
    )


FAMILY = Family(
    architectures=("Gemma3ForCausalLM", "Gemma3ForConditionalGeneration"),
    spec_from_config=spec_from_config,
    checkpoint_plan=checkpoint_plan,
    other_tensors=(r"vision_tower\..*", r"multi_modal_projector\..*"),
)
