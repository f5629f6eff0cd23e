"""Decoders with squared ReLUs and no gate: Nvidia's Nemotron, Arcee's AFM, and Jais 2."""

from __future__ import annotations

from jaxinfer.models.family import Config, Family, llama_like_spec, plain_mlp, renamed
from jaxinfer.models.spec import DecoderSpec, NormSpec


def _spec(config: Config, max_model_len: int | None, norm: NormSpec) -> DecoderSpec:
    bias = config["attention_bias"]
    return llama_like_spec(
        config,
        max_model_len,
        attention={"qkv_bias": bias, "o_bias": bias},
        mlp=plain_mlp(config, config["mlp_bias"]),
        norm=norm,
    )


def _nemotron_spec(config: Config, max_model_len: int | None) -> DecoderSpec:
    config = renamed(
        config,
        {},
        hidden_act="relu2",
        norm_eps=1e-5,
        partial_rotary_factor=0.5,
        attention_bias=False,
        mlp_bias=False,
    )
    norm = NormSpec("layer", config["norm_eps"], has_bias=True, weight_offset=1.0)
    return _spec(config, max_model_len, norm)


def _arcee_spec(config: Config, max_model_len: int | None) -> DecoderSpec:
    config = renamed(
        config, {}, hidden_act="relu2", rms_norm_eps=1e-5, attention_bias=False, mlp_bias=False
    )
    return _spec(config, max_model_len, NormSpec("rms", config["rms_norm_eps"]))


def _jais2_spec(config: Config, max_model_len: int | None) -> DecoderSpec:
    config = renamed(
        config, {}, hidden_act="relu2", layer_norm_eps=1e-5, attention_bias=True, mlp_bias=True
    )
    norm = NormSpec("layer", config["layer_norm_eps"], has_bias=True)
    return _spec(config, max_model_len, norm)


FAMILIES = (
    Family(architectures=("NemotronForCausalLM",), spec_from_config=_nemotron_spec),
    Family(architectures=("ArceeForCausalLM",), spec_from_config=_arcee_spec),
    Family(architectures=("Jais2ForCausalLM",), spec_from_config=_jais2_spec),
)
