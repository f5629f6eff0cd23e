"""Mixtral, and models that store experts as it does: MiniMax-M2 with sigmoid scores, Phi-3.5-MoE with its own mixer."""

from __future__ import annotations

from jaxinfer.models.checkpoint_layout import Names
from jaxinfer.models.family import Config, Family, llama_like_spec, renamed
from jaxinfer.models.moe_family import moe_spec, with_experts
from jaxinfer.models.moe_layout import MoeNames
from jaxinfer.models.spec import DecoderSpec, NormSpec, QKNormSpec

MIXTRAL_EXPERTS = MoeNames(
    router="block_sparse_moe.gate.weight",
    correction_bias="block_sparse_moe.e_score_correction_bias",
    expert="block_sparse_moe.experts.{}.",
    gate_up=("w1.weight", "w3.weight"),
    down="w2.weight",
)


def _mixtral_spec(config: Config, max_model_len: int | None) -> DecoderSpec:
    config = renamed(config, {}, num_local_experts=8, num_experts_per_tok=2, rope_theta=1e6)
    spec = llama_like_spec(
        config,
        max_model_len,
        norm_eps=1e-5,
        windows=[config.get("sliding_window")] * config["num_hidden_layers"],
    )
    moe = moe_spec(config, config["intermediate_size"], routing={"renormalize": True})
    return with_experts(spec, moe)


def _minimax_m2_spec(config: Config, max_model_len: int | None) -> DecoderSpec:
    config = renamed(config, {}, rope_theta=5e6)
    if "rotary_dim" in config:
        config.setdefault("partial_rotary_factor", config["rotary_dim"] / config["head_dim"])
    norm = NormSpec("rms", config.get("rms_norm_eps", 1e-6))
    spec = llama_like_spec(
        config, max_model_len, attention={"qk_norm": QKNormSpec(norm, over="projection")}
    )
    routing = {"scores": "sigmoid", "correction_bias": "scores", "renormalize": True}
    return with_experts(spec, moe_spec(config, config["intermediate_size"], routing=routing))


def _phimoe_spec(config: Config, max_model_len: int | None) -> DecoderSpec:
    config = renamed(
        config, {}, num_local_experts=16, num_experts_per_tok=2, router_jitter_noise=0.01
    )
    bias = config.get("attention_bias", False)
    spec = llama_like_spec(
        config,
        max_model_len,
        attention={"qkv_bias": bias, "o_bias": bias},
        norm=NormSpec("layer", config.get("rms_norm_eps", 1e-5), has_bias=True),
        windows=[config.get("sliding_window")] * config["num_hidden_layers"],
        head_bias=config.get("lm_head_bias", False),
    )
    routing = {"scores": "sparse_mixer", "mixer_jitter": config["router_jitter_noise"]}
    return with_experts(spec, moe_spec(config, config["intermediate_size"], routing=routing))


_NAMES = Names(moe=MIXTRAL_EXPERTS)
FAMILIES = (
    Family(architectures=("MixtralForCausalLM",), spec_from_config=_mixtral_spec, names=_NAMES),
    Family(
        architectures=("MiniMaxM2ForCausalLM",), spec_from_config=_minimax_m2_spec, names=_NAMES
    ),
    Family(architectures=("PhimoeForCausalLM",), spec_from_config=_phimoe_spec, names=_NAMES),
)
