"""Llama 1 to 3 and the many models published in its form; the text model of Emu3."""

from __future__ import annotations

from jaxinfer.models.family import Config, Family, llama_like_spec, renamed
from jaxinfer.models.spec import DecoderSpec


def spec_from_config(config: Config, max_model_len: int | None) -> DecoderSpec:
    config = renamed(config, {"qkv_bias": "attention_bias", "bias": "mlp_bias"})
    attention_bias = config.get("attention_bias", False)
    return llama_like_spec(
        config,
        max_model_len,
        attention={"qkv_bias": attention_bias, "o_bias": attention_bias},
        mlp_bias=config.get("mlp_bias", False),
    )


def _emu3_spec(config: Config, max_model_len: int | None) -> DecoderSpec:
    return spec_from_config(
        {"rope_theta": 1_000_000.0, "rms_norm_eps": 1e-5, **config}, max_model_len
    )


FAMILIES = (
    Family(
        architectures=("LlamaForCausalLM", "InternLM3ForCausalLM", "IQuestCoderForCausalLM"),
        spec_from_config=spec_from_config,
    ),
    Family(architectures=("Emu3ForCausalLM",), spec_from_config=_emu3_spec),
)
