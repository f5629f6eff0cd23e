"""AI2's OLMo: norms without weights at first, then behind attention and MLP, with norms of all queries and all keys; and
windows in three of four layers at last."""

from __future__ import annotations

from typing import Any

from jaxinfer.models.family import (
    Config,
    Family,
    layer_type_ropes,
    llama_like_spec,
    renamed,
    sliding_windows,
)
from jaxinfer.models.spec import DecoderSpec, NormSpec, QKNormSpec


def _olmo_spec(config: Config, max_model_len: int | None) -> DecoderSpec:
    bias = config.get("attention_bias", False)
    return llama_like_spec(
        config,
        max_model_len,
        attention={"qkv_bias": bias, "o_bias": bias, "qkv_clip": config.get("clip_qkv")},
        norm=NormSpec("layer", 1e-5, has_weight=False),
    )


def olmo2_attention(config: Config) -> dict[str, Any]:
    """Norms over all queries, and over all keys of a token."""
    bias = config.get("attention_bias", False)
    norm = NormSpec("rms", config.get("rms_norm_eps", 1e-5))
    return {"qkv_bias": bias, "o_bias": bias, "qk_norm": QKNormSpec(norm, over="projection")}


def _olmo2_spec(config: Config, max_model_len: int | None) -> DecoderSpec:
    return llama_like_spec(
        config, max_model_len, attention=olmo2_attention(config), norms="post", norm_eps=1e-5
    )


def _olmo3_spec(config: Config, max_model_len: int | None) -> DecoderSpec:
    config = renamed(config, {}, rope_theta=500_000.0, sliding_window=4096)
    windows = sliding_windows(
        config,
        [
            config["sliding_window"] if (i + 1) % 4 else None
            for i in range(config["num_hidden_layers"])
        ],
    )
    return llama_like_spec(
        config,
        max_model_len,
        attention=olmo2_attention(config),
        norms="post",
        norm_eps=1e-5,
        windows=windows,
        ropes=layer_type_ropes(config, max_model_len, windows),
    )


FAMILIES = (
    Family(architectures=("OlmoForCausalLM",), spec_from_config=_olmo_spec),
    Family(architectures=("Olmo2ForCausalLM",), spec_from_config=_olmo2_spec),
    Family(architectures=("Olmo3ForCausalLM",), spec_from_config=_olmo3_spec),
)
