"""Qwen3-Next and Qwen 3.5 (text): gated delta nets with gated attention between them, an MLP or a mixture after each."""

from __future__ import annotations

from dataclasses import replace

from jaxinfer.models.checkpoint_layout import Names
from jaxinfer.models.families.qwen_moe import SHARED_EXPERT, every_few_layers
from jaxinfer.models.family import (
    Config,
    Family,
    activation,
    layer_kinds,
    llama_like_spec,
    rms_head_norm,
    with_states,
)
from jaxinfer.models.moe_family import moe_spec, with_experts
from jaxinfer.models.spec import DecoderSpec, NormSpec
from jaxinfer.models.state_layout import DeltaNetNames
from jaxinfer.models.state_spec import DeltaNetSpec


def spec_from_config(config: Config, max_model_len: int | None) -> DecoderSpec:
    config = {"partial_rotary_factor": 0.25, "head_dim": 256, **config.get("text_config", config)}
    if config.get("attention_bias"):
        raise ValueError("attention_bias (True) is not supported for qwen3_5.")
    eps, interval = config.get("rms_norm_eps", 1e-6), config.get("full_attention_interval", 4)
    every = [
        "linear_attention" if (i + 1) % interval else "full_attention"
        for i in range(config["num_hidden_layers"])
    ]
    spec = llama_like_spec(
        config,
        max_model_len,
        attention={"gated": True, "qk_norm": rms_head_norm(eps, weight_offset=1.0)},
        norm=NormSpec("rms", eps, weight_offset=1.0),
    )
    state = delta_net_state(config)
    kinds = layer_kinds(config, every)
    return with_states(spec, [state if kind == "linear_attention" else None for kind in kinds])


def moe_spec_from_config(config: Config, max_model_len: int | None) -> DecoderSpec:
    config = config.get("text_config", config)
    defaults = {"intermediate_size": config["moe_intermediate_size"]}
    spec = spec_from_config({**defaults, **config}, max_model_len)
    moe = moe_spec(
        config,
        config["moe_intermediate_size"],
        shared_dim=config["shared_expert_intermediate_size"],
        shared_gate=True,
        routing={"renormalize": config.get("norm_topk_prob", True)},
    )
    return with_experts(spec, moe, every_few_layers(config))


def delta_net_state(config: Config) -> DeltaNetSpec:
    return DeltaNetSpec(
        num_key_heads=config.get("linear_num_key_heads", 16),
        num_value_heads=config.get("linear_num_value_heads", 32),
        key_dim=config.get("linear_key_head_dim", 128),
        value_dim=config.get("linear_value_head_dim", 128),
        conv_kernel=config.get("linear_conv_kernel_dim", 4),
        activation=activation(config),
        norm_eps=config.get("rms_norm_eps", 1e-6),
    )


_NAMES = Names(
    state="linear_attn.",
    delta_net=DeltaNetNames(
        in_proj=(
            ("in_proj_qkv", "qkv"),
            ("in_proj_z", "z"),
            ("in_proj_b", "b"),
            ("in_proj_a", "a"),
        )
    ),
)
_NEXT_NAMES = replace(
    _NAMES,
    delta_net=DeltaNetNames(
        in_proj=(("in_proj_qkvz", "qkvz"), ("in_proj_ba", "ba")), interleaved=True
    ),
    moe=SHARED_EXPERT,
)
_OTHERS = (r"mtp\..*", r"model\.visual\..*")

FAMILIES = (
    Family(("Qwen3_5ForCausalLM",), spec_from_config, _NAMES, other_tensors=_OTHERS),
    Family(("Qwen3NextForCausalLM",), moe_spec_from_config, _NEXT_NAMES, other_tensors=_OTHERS),
    Family(
        ("Qwen3_5MoeForCausalLM",),
        moe_spec_from_config,
        replace(_NAMES, moe=SHARED_EXPERT),
        other_tensors=_OTHERS,
    ),
    Family(
        ("Qwen3_5MoeForConditionalGeneration",),
        moe_spec_from_config,
        replace(_NAMES, prefix="model.language_model.", moe=SHARED_EXPERT),
        other_tensors=_OTHERS,
    ),
    Family(
        ("Qwen3_5ForConditionalGeneration",),
        spec_from_config,
        replace(_NAMES, prefix="model.language_model."),
        other_tensors=_OTHERS,
    ),
)
