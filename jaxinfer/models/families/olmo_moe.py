"""AI2's OLMo with experts: OLMoE, and FlexOlmo with norms behind attention and mixture."""

from __future__ import annotations

from typing import Any

from jaxinfer.models.family import Config, Family, llama_like_spec, refuse, renamed
from jaxinfer.models.moe_family import moe_spec, with_experts
from jaxinfer.models.spec import DecoderSpec, NormSpec, QKNormSpec


def _attention(config: Config) -> dict[str, Any]:
    """Norms over all queries, and over all keys of a token."""
    bias = config.get("attention_bias", False)
    norm = NormSpec("rms", config["rms_norm_eps"])
    return {"qkv_bias": bias, "o_bias": bias, "qk_norm": QKNormSpec(norm, over="projection")}


def _olmoe_spec(config: Config, max_model_len: int | None) -> DecoderSpec:
    config = renamed(config, {}, rms_norm_eps=1e-5)
    refuse(config, sliding_window=None, clip_qkv=None)
    spec = llama_like_spec(
        config,
        max_model_len,
        attention=_attention(config),
    )
    routing = {"renormalize": config.get("norm_topk_prob", False)}
    return with_experts(spec, moe_spec(config, config["intermediate_size"], routing=routing))


def _flex_olmo_spec(config: Config, max_model_len: int | None) -> DecoderSpec:
    config = renamed(config, {}, rms_norm_eps=1e-6, rope_theta=500_000.0)
    spec = llama_like_spec(config, max_model_len, attention=_attention(config), norms="post")
    routing = {"renormalize": config.get("norm_topk_prob", False)}
    return with_experts(spec, moe_spec(config, config["intermediate_size"], routing=routing))


FAMILIES = (
    Family(architectures=("OlmoeForCausalLM",), spec_from_config=_olmoe_spec),
    Family(architectures=("FlexOlmoForCausalLM",), spec_from_config=_flex_olmo_spec),
)
