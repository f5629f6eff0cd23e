"""Zhipu's GLM 4 in both forms (the newer norms what attention and MLP return too), and other decoders that rotate
neighbouring elements: Kyutai's Helium and Baidu's ERNIE 4.5."""

from __future__ import annotations

from jaxinfer.models.checkpoint_layout import Names
from jaxinfer.models.family import Config, Family, llama_like_spec, renamed
from jaxinfer.models.spec import DecoderSpec, NormPlacement

_GATE_UP = ("mlp.gate_up_proj",)


def _glm_spec(
    config: Config, max_model_len: int | None, norms: NormPlacement = "pre"
) -> DecoderSpec:
    config = renamed(config, {}, partial_rotary_factor=0.5, rms_norm_eps=1.5625e-7, head_dim=128)
    return llama_like_spec(
        config,
        max_model_len,
        attention={"qkv_bias": config.get("attention_bias", True)},
        norms=norms,
    )


def _glm4_spec(config: Config, max_model_len: int | None) -> DecoderSpec:
    return _glm_spec(config, max_model_len, norms="both")


def _helium_spec(config: Config, max_model_len: int | None) -> DecoderSpec:
    config = renamed(config, {}, rope_theta=100_000.0, rms_norm_eps=1e-8, head_dim=128)
    return llama_like_spec(
        config,
        max_model_len,
        attention={"qkv_bias": config.get("attention_bias", False)},
        mlp_bias=config.get("mlp_bias", False),
    )


def _ernie_spec(config: Config, max_model_len: int | None) -> DecoderSpec:
    config = renamed(
        config,
        {},
        rope_theta=500_000.0,
        rms_norm_eps=1e-5,
        head_dim=128,
        tie_word_embeddings=True,
    )
    bias = config.get("use_bias", False)
    return llama_like_spec(
        config, max_model_len, attention={"qkv_bias": bias, "o_bias": bias}, mlp_bias=bias
    )


FAMILIES = (
    Family(
        architectures=("GlmForCausalLM",),
        spec_from_config=_glm_spec,
        names=Names(gate_up=_GATE_UP, interleaved_rope=True),
    ),
    Family(
        architectures=("Glm4ForCausalLM",),
        spec_from_config=_glm4_spec,
        names=Names(
            gate_up=_GATE_UP,
            interleaved_rope=True,
            attention_post_norm="post_self_attn_layernorm",
            mlp_post_norm="post_mlp_layernorm",
        ),
    ),
    Family(
        architectures=("HeliumForCausalLM",),
        spec_from_config=_helium_spec,
        names=Names(interleaved_rope=True),
    ),
    Family(
        architectures=("Ernie4_5ForCausalLM",),
        spec_from_config=_ernie_spec,
        names=Names(interleaved_rope=True),
    ),
)
