"""Gemma 1 and 2 and VaultGemma: scaled embeddings, norm weights stored as differences from one, soft caps."""

from __future__ import annotations

from typing import Any

from jaxinfer.models.checkpoint_layout import Names
from jaxinfer.models.family import (
    Config,
    Family,
    activation,
    llama_like_spec,
    refuse,
    renamed,
    sliding_windows,
)
from jaxinfer.models.spec import DecoderSpec, GatedMlpSpec, NormPlacement, NormSpec

_DEFAULTS: dict[str, Any] = {"head_dim": 256, "rms_norm_eps": 1e-6, "tie_word_embeddings": True}


def _spec(config: Config, max_model_len: int | None, act: str, attention: dict[str, Any], **more):
    bias = config.get("attention_bias", False)
    return llama_like_spec(
        config,
        max_model_len,
        attention={"qkv_bias": bias, "o_bias": bias, **attention},
        mlp=GatedMlpSpec(config["intermediate_size"], activation({"hidden_act": act})),
        norm=NormSpec("rms", config["rms_norm_eps"], weight_offset=1.0),
        embed_scale=config["hidden_size"] ** 0.5,
        **more,
    )


def _gemma_spec(config: Config, max_model_len: int | None) -> DecoderSpec:
    config = renamed(config, {}, hidden_act="gelu_pytorch_tanh", **_DEFAULTS)
    if config.get("use_bidirectional_attention"):
        refuse(config, use_bidirectional_attention=False)
    act = config.get("hidden_activation") or config["hidden_act"]
    # The first configs say "gelu" and mean its approximation.
    return _spec(config, max_model_len, "gelu_pytorch_tanh" if act == "gelu" else act, {})


def _capped_spec(
    config: Config, max_model_len: int | None, norms: NormPlacement = "both"
) -> DecoderSpec:
    caps = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0} | {
        key: config[key] for key in config if key.endswith("logit_softcapping")
    }
    config = renamed(
        config,
        {},
        hidden_activation="gelu_pytorch_tanh",
        query_pre_attn_scalar=256,
        sliding_window=4096,
        num_key_value_heads=4,
        **_DEFAULTS,
    )
    if config.get("use_bidirectional_attention"):
        refuse(config, use_bidirectional_attention=False)
    alternating = [
        None if i % 2 else config["sliding_window"] for i in range(config["num_hidden_layers"])
    ]
    return _spec(
        config,
        max_model_len,
        config["hidden_activation"],
        {
            "query_scale": config["query_pre_attn_scalar"] ** -0.5,
            "soft_cap": caps["attn_logit_softcapping"],
        },
        norms=norms,
        windows=sliding_windows(config, alternating),
        logit_soft_cap=caps["final_logit_softcapping"],
    )


def _vault_spec(config: Config, max_model_len: int | None) -> DecoderSpec:
    return _capped_spec(config, max_model_len, norms="pre")


_NAMES = Names(mlp_norm="pre_feedforward_layernorm")

FAMILIES = (
    Family(architectures=("GemmaForCausalLM",), spec_from_config=_gemma_spec),
    Family(architectures=("Gemma2ForCausalLM",), spec_from_config=_capped_spec, names=_NAMES),
    Family(architectures=("VaultGemmaForCausalLM",), spec_from_config=_vault_spec, names=_NAMES),
)
