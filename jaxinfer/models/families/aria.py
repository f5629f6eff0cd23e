"""Rhymes' Aria (text): Llama's attention, and experts stored with their inputs first."""

from __future__ import annotations

from jaxinfer.models.checkpoint_layout import Names
from jaxinfer.models.family import Config, Family, llama_like_spec, refuse, renamed
from jaxinfer.models.moe_family import moe_spec, with_experts
from jaxinfer.models.moe_layout import MoeNames
from jaxinfer.models.spec import DecoderSpec


def _spec(config: Config, max_model_len: int | None) -> DecoderSpec:
    refuse(config, mlp_bias=False)
    config = renamed(config, {}, moe_num_experts=8, moe_topk=2, moe_num_shared_experts=2)
    bias = config.get("attention_bias", False)
    spec = llama_like_spec(config, max_model_len, attention={"qkv_bias": bias, "o_bias": bias})
    moe = moe_spec(
        config,
        config["intermediate_size"],
        activation="silu",
        shared_dim=config["intermediate_size"] * config["moe_num_shared_experts"],
        routing={"renormalize": True},
    )
    return with_experts(spec, moe)


FAMILIES = (
    Family(
        architectures=("AriaTextForCausalLM",),
        spec_from_config=_spec,
        names=Names(
            moe=MoeNames(
                router="mlp.router.weight",
                expert=None,
                all_gate_up=("mlp.experts.fc1.weight",),
                all_down="mlp.experts.fc2.weight",
                layout="in_out",
            )
        ),
    ),
)
