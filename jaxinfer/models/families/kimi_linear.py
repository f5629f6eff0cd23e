"""Kimi Linear: delta attention with a decay per channel, latent attention without positions between, mixtures."""

from __future__ import annotations

from dataclasses import replace

from jaxinfer.models.checkpoint_layout import Names, decoder_plan
from jaxinfer.models.families.deepseek import latent_decoder_spec
from jaxinfer.models.family import Config, Family, activation, layer_kinds, renamed, with_states
from jaxinfer.models.moe_family import (
    after_dense,
    deepseek_routing,
    moe_spec,
    sparse_layers,
    with_experts,
)
from jaxinfer.models.moe_layout import MoeNames
from jaxinfer.models.sharded_dims import ShardedDims
from jaxinfer.models.spec import DecoderSpec, NormSpec, RopeSpec
from jaxinfer.models.state_spec import KimiDeltaSpec
from jaxinfer.weights.plan import LoadPlan

_RENAMED = {
    "model_max_length": "max_position_embeddings",
    "moe_renormalize": "norm_topk_prob",
    "num_expert_group": "n_group",
    "num_local_experts": "num_experts",
    "num_experts_per_token": "num_experts_per_tok",
    "num_shared_experts": "n_shared_experts",
}
_LATENT_NORM_EPS = 1e-6
"""Which no config says."""


def spec_from_config(config: Config, max_model_len: int | None) -> DecoderSpec:
    config = renamed(config, _RENAMED, n_shared_experts=1, first_k_dense_replace=1)
    num_layers, linear = config["num_hidden_layers"], config.get("linear_attn_config") or {}
    spec = latent_decoder_spec(config, max_model_len)
    # What other models rotate stays as it is.
    unrotated = RopeSpec((0.0,) * (config["qk_rope_head_dim"] // 2))
    norm = NormSpec("rms", _LATENT_NORM_EPS)
    spec = replace(
        spec,
        layers=tuple(
            replace(layer, attention=replace(layer.attention, rope=unrotated, norm=norm))
            for layer in spec.layers
        ),
    )
    head_dim = linear.get("head_dim") or config.get("linear_head_dim", 128)
    state = KimiDeltaSpec(
        num_heads=linear.get("num_heads") or config.get("linear_num_heads", 32),
        head_dim=head_dim,
        conv_kernel=linear.get("short_conv_kernel_size") or config.get("linear_conv_kernel_dim", 4),
        gate_rank=head_dim,
        activation=activation(config),
        norm_eps=config.get("rms_norm_eps", 1e-5),
    )
    attending = linear.get("full_attn_layers")
    every = [
        "full_attention"
        if (i % 4 == 0 and i > 0 if attending is None else i + 1 in attending)
        else "linear_attention"
        for i in range(num_layers)
    ]
    kinds = layer_kinds(config, every)
    spec = with_states(spec, [state if kind == "linear_attention" else None for kind in kinds])
    moe = moe_spec(
        config,
        config["moe_intermediate_size"],
        shared_dim=config["moe_intermediate_size"] * config["n_shared_experts"],
        routing=deepseek_routing(config),
    )
    return with_experts(spec, moe, sparse_layers(config, after_dense(config)))


_NAMES = Names(
    state="self_attn.",
    moe=MoeNames(
        router="block_sparse_moe.gate.weight",
        correction_bias="block_sparse_moe.gate.e_score_correction_bias",
        expert="block_sparse_moe.experts.{}.",
        gate_up=("w1.weight", "w3.weight"),
        down="w2.weight",
        all_gate_up=("block_sparse_moe.experts.gate_up_proj",),
        all_down="block_sparse_moe.experts.down_proj",
        shared_gate_up=(
            "block_sparse_moe.shared_experts.gate_proj.weight",
            "block_sparse_moe.shared_experts.up_proj.weight",
        ),
        shared_down="block_sparse_moe.shared_experts.down_proj.weight",
    ),
)


def checkpoint_plan(config: Config, spec: DecoderSpec, dims: ShardedDims) -> LoadPlan:
    """transformers has one name for MLPs and mixtures, and saves them under the mixtures' original one."""

    def saved(name: str) -> str:
        return name.replace(".mlp.", ".block_sparse_moe.")

    return {
        path: source.or_else(source.renamed(saved)) if ".mlp." in source.names[0] else source
        for path, source in decoder_plan(spec, dims, _NAMES).items()
    }


FAMILIES = (
    Family(
        architectures=("KimiLinearForCausalLM",),
        spec_from_config=spec_from_config,
        checkpoint_plan=checkpoint_plan,
    ),
)
