"""IBM's Granite: Llama with factors on embeddings, scores, residuals and logits; its form with windows and sinks; and Naver's
HyperCLOVA X, which norms what attention and MLP return too."""

from __future__ import annotations

from typing import Any

from jaxinfer.models.checkpoint_layout import Names
from jaxinfer.models.family import (
    Config,
    Family,
    config_rope,
    head_dim,
    llama_like_spec,
    renamed,
    sliding_windows,
)
from jaxinfer.models.spec import DecoderSpec

_DEFAULTS: dict[str, Any] = {
    "embedding_multiplier": 1.0,
    "logits_scaling": 1.0,
    "residual_multiplier": 1.0,
}


def granite_like_spec(config: Config, max_model_len: int | None, **features: Any) -> DecoderSpec:
    """`features` as for `llama_like_spec`."""
    config = _DEFAULTS | config
    bias = config.get("attention_bias", False)
    attention = {
        "qkv_bias": bias,
        "o_bias": bias,
        "query_scale": config.get("attention_multiplier", 1.0),
        **features.pop("attention", {}),
    }
    return llama_like_spec(
        config,
        max_model_len,
        attention=attention,
        mlp_bias=config.get("mlp_bias", False),
        residual_scale=config["residual_multiplier"],
        embed_scale=config["embedding_multiplier"],
        logit_scale=features.pop("logit_scale", 1 / config["logits_scaling"]),
        **features,
    )


def _granite_spec(config: Config, max_model_len: int | None) -> DecoderSpec:
    return granite_like_spec(renamed(config, {}), max_model_len)


def granite_swa_layers(config: Config, max_model_len: int | None) -> dict[str, Any]:
    """Windows and rotations by layer: `layer_rope_theta` has a base for each, 0 for none."""
    num_layers = config["num_hidden_layers"]
    windows = sliding_windows(
        config,
        [config.get("sliding_window", 128) if i % 4 else None for i in range(num_layers)],
    )
    thetas = config.get("layer_rope_theta")
    if thetas is None:
        return {"windows": windows}
    if len(thetas) != num_layers:
        raise ValueError(
            f"layer_rope_theta must have num_hidden_layers ({num_layers}) entries, got {len(thetas)}."
        )
    ropes = {
        theta: config_rope(
            {
                **config,
                "rope_parameters": {**config.get("rope_parameters", {}), "rope_theta": theta},
            },
            max_model_len,
        )[0]
        for theta in set(thetas)
        if theta
    }
    return {"windows": windows, "ropes": [ropes.get(theta) for theta in thetas]}


def _granite_swa_spec(config: Config, max_model_len: int | None) -> DecoderSpec:
    config = renamed(config, {}, num_key_value_heads=4, rms_norm_eps=1e-5, tie_word_embeddings=True)
    return granite_like_spec(
        config,
        max_model_len,
        attention={"sinks": True},
        **granite_swa_layers(config, max_model_len),
    )


def _hyperclova_spec(config: Config, max_model_len: int | None) -> DecoderSpec:
    config = renamed(config, {})
    config.setdefault("attention_multiplier", head_dim(config) ** -0.5)
    norms = "both" if config.get("use_post_norm", True) else "pre"
    scale = config.get("logits_scaling", 1.0)  # Granite divides by it
    return granite_like_spec(config, max_model_len, norms=norms, logit_scale=scale)


FAMILIES = (
    Family(architectures=("GraniteForCausalLM",), spec_from_config=_granite_spec),
    Family(architectures=("GraniteSWAForCausalLM",), spec_from_config=_granite_swa_spec),
    Family(
        architectures=("HyperCLOVAXForCausalLM",),
        spec_from_config=_hyperclova_spec,
        names=Names(attention_post_norm="post_norm1", mlp_post_norm="post_norm2"),
    ),
)
