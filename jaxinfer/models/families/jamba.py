"""Jamba: selective scans with attention without positions between them, an MLP or a mixture after each."""

from __future__ import annotations

import math

from jaxinfer.models.checkpoint_layout import Names
from jaxinfer.models.family import Config, Family, activation, llama_like_spec, with_states
from jaxinfer.models.moe_family import moe_spec, with_experts
from jaxinfer.models.moe_layout import MoeNames
from jaxinfer.models.spec import DecoderSpec
from jaxinfer.models.state_spec import MambaSpec


def spec_from_config(config: Config, max_model_len: int | None) -> DecoderSpec:
    num_experts, num_layers = config.get("num_experts", 16), config["num_hidden_layers"]
    embed_dim, rank = config["hidden_size"], config.get("mamba_dt_rank", "auto")
    state = MambaSpec(
        inner_dim=config.get("mamba_expand", 2) * embed_dim,
        state_dim=config.get("mamba_d_state", 16),
        step_rank=math.ceil(embed_dim / 16) if rank == "auto" else rank,
        conv_kernel=config.get("mamba_d_conv", 4),
        conv_bias=config.get("mamba_conv_bias", True),
        bias=config.get("mamba_proj_bias", False),
        activation=activation(config),
        step_norms="weighted",
        norm_eps=config.get("rms_norm_eps", 1e-6),
    )
    period, offset = config.get("attn_layer_period", 8), config.get("attn_layer_offset", 4)
    spec = llama_like_spec(config, max_model_len, ropes=[None] * num_layers)
    spec = with_states(spec, [None if i % period == offset else state for i in range(num_layers)])
    if num_experts == 1:
        return spec
    moe = moe_spec(
        {"num_experts": 16, "num_experts_per_tok": 2, **config}, config["intermediate_size"]
    )
    period, offset = config.get("expert_layer_period", 2), config.get("expert_layer_offset", 1)
    return with_experts(spec, moe, [i % period == offset for i in range(num_layers)])


FAMILIES = (
    Family(
        architectures=("JambaForCausalLM",),
        spec_from_config=spec_from_config,
        names=Names(
            norm="final_layernorm",
            mlp_norm="pre_ff_layernorm",
            gate_up=("feed_forward.gate_proj", "feed_forward.up_proj"),
            down="feed_forward.down_proj",
            moe=MoeNames(
                router="feed_forward.router.weight",
                expert="feed_forward.experts.{}.",
                all_gate_up=("feed_forward.experts.gate_up_proj",),
                all_down="feed_forward.experts.down_proj",
            ),
        ),
    ),
)
