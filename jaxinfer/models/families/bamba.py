"""Bamba and Granite 4 (granitemoehybrid): Mamba-2 layers with attention between them, an MLP or a mixture after each."""

from __future__ import annotations

from typing import Any

from jaxinfer.models.checkpoint_layout import Names
from jaxinfer.models.family import (
    Config,
    Family,
    activation,
    layer_kinds,
    llama_like_spec,
    step_limits,
    with_states,
)
from jaxinfer.models.moe_family import moe_spec, with_experts
from jaxinfer.models.moe_layout import MoeNames
from jaxinfer.models.spec import DecoderSpec, GatedMlpSpec
from jaxinfer.models.state_spec import Mamba2Spec

_BAMBA_NAMES = Names(
    norm="final_layernorm",
    mlp_norm="pre_ff_layernorm",
    gate_up=("feed_forward.gate_proj", "feed_forward.up_proj"),
    down="feed_forward.down_proj",
)
_GRANITE_NAMES = Names(
    gate_up=("shared_mlp.input_linear",),
    down="shared_mlp.output_linear",
    moe=MoeNames(
        router="block_sparse_moe.router.layer.weight",
        expert=None,
        all_gate_up=("block_sparse_moe.input_linear.weight",),
        all_down="block_sparse_moe.output_linear.weight",
        shared_gate_up=("shared_mlp.input_linear.weight",),
        shared_down="shared_mlp.output_linear.weight",
    ),
)


def mamba2_state(config: Config, **features: Any) -> Mamba2Spec:
    """From the names that most hybrids' configs have for it."""
    num_heads, bias = config["mamba_n_heads"], config.get("mamba_proj_bias", False)
    head_dim = config.get("mamba_d_head", "auto")
    if head_dim == "auto":
        head_dim = config.get("mamba_expand", 2) * config["hidden_size"] // num_heads
    return Mamba2Spec(
        **{
            "num_heads": num_heads,
            "head_dim": head_dim,
            "num_groups": config.get("mamba_n_groups", 1),
            "state_dim": config.get("mamba_d_state", 256),
            "conv_kernel": config.get("mamba_d_conv", 4),
            "conv_bias": config.get("mamba_conv_bias", True),
            "in_bias": bias,
            "out_bias": bias,
            "activation": activation(config),
            "norm_eps": config["rms_norm_eps"],
            "step_limits": step_limits(config),
            **features,
        }
    )


def bamba_spec(config: Config, max_model_len: int | None) -> DecoderSpec:
    bias = config.get("attention_bias", False)
    spec = llama_like_spec(
        {**config, "partial_rotary_factor": 0.5},
        max_model_len,
        attention={"qkv_bias": bias, "o_bias": bias},
        mlp_bias=config.get("mlp_bias", False),
    )
    attending = config.get("attn_layer_indices") or ()
    state = mamba2_state(config)
    return with_states(spec, [None if i in attending else state for i in range(len(spec.layers))])


def granite_spec(config: Config, max_model_len: int | None) -> DecoderSpec:
    position_type = config.get("position_embedding_type")
    if position_type not in (None, "nope", "rope"):
        raise ValueError(
            f'position_embedding_type {position_type!r} is not supported; supported: "rope", "nope".'
        )
    bias, num_layers = config.get("attention_bias", False), config["num_hidden_layers"]
    spec = llama_like_spec(
        config,
        max_model_len,
        attention={
            "qkv_bias": bias,
            "o_bias": bias,
            "query_scale": config.get("attention_multiplier", 1.0),
        },
        mlp=GatedMlpSpec(config["shared_intermediate_size"], activation(config)),
        ropes=None if position_type == "rope" else [None] * num_layers,
        residual_scale=config.get("residual_multiplier", 1.0),
        embed_scale=config.get("embedding_multiplier", 1.0),
        logit_scale=1 / config.get("logits_scaling", 1.0),
    )
    state = mamba2_state(config)
    kinds = layer_kinds(config, ["linear_attention"] * num_layers)
    spec = with_states(spec, [state if kind == "linear_attention" else None for kind in kinds])
    if not config.get("num_local_experts", 8):
        return spec
    moe = moe_spec(
        {"num_local_experts": 8, "num_experts_per_tok": 2, **config},
        config["intermediate_size"],
        shared_dim=config["shared_intermediate_size"],
        routing={"renormalize": True},
    )
    return with_experts(spec, moe)


FAMILIES = (
    Family(("BambaForCausalLM",), bamba_spec, _BAMBA_NAMES),
    Family(("GraniteMoeHybridForCausalLM",), granite_spec, _GRANITE_NAMES),
)
