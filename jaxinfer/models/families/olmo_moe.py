"""AI2's OLMo with experts: OLMoE, and FlexOlmo with norms behind attention and mixture."""

from __future__ import annotations

from jaxinfer.models.families.olmo import olmo2_attention
from jaxinfer.models.family import Config, Family, llama_like_spec, refuse, renamed
from jaxinfer.models.moe_family import moe_spec, with_experts
from jaxinfer.models.spec import DecoderSpec


def _olmoe_spec(config: Config, max_model_len: int | None) -> DecoderSpec:
    config = renamed(config, {})
    refuse(config, sliding_window=None, clip_qkv=None)
    spec = llama_like_spec(
        config,
        max_model_len,
        norm_eps=1e-5,
        attention=olmo2_attention(config),
    )
    routing = {"renormalize": config.get("norm_topk_prob", False)}
    return with_experts(spec, moe_spec(config, config["intermediate_size"], routing=routing))


def _flex_olmo_spec(config: Config, max_model_len: int | None) -> DecoderSpec:
    config = renamed(config, {}, rms_norm_eps=1e-6, rope_theta=500_000.0)
    spec = llama_like_spec(config, max_model_len, attention=olmo2_attention(config), norms="post")
    routing = {"renormalize": config.get("norm_topk_prob", False)}
    return with_experts(spec, moe_spec(config, config["intermediate_size"], routing=routing))


FAMILIES = (
    Family(architectures=("OlmoeForCausalLM",), spec_from_config=_olmoe_spec),
    Family(architectures=("FlexOlmoForCausalLM",), spec_from_config=_flex_olmo_spec),
)
