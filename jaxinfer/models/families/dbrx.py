"""Databricks' DBRX: its experts' rows one after another in three tensors, and queries, keys and values cut to a range."""

from __future__ import annotations

from jaxinfer.models.checkpoint_layout import Names
from jaxinfer.models.family import Config, Family, llama_like_spec, refuse, renamed
from jaxinfer.models.moe_family import moe_spec, with_experts
from jaxinfer.models.moe_layout import MoeNames
from jaxinfer.models.spec import DecoderSpec, NormSpec

_RENAMED = {
    "d_model": "hidden_size",
    "n_heads": "num_attention_heads",
    "n_layers": "num_hidden_layers",
    "max_seq_len": "max_position_embeddings",
}


def _spec(config: Config, max_model_len: int | None) -> DecoderSpec:
    attention = {"kv_n_heads": 1, **(config.get("attn_config") or {})}
    ffn = {"moe_num_experts": 4, "moe_top_k": 1, **(config.get("ffn_config") or {})}
    refuse(ffn, moe_normalize_expert_weights=1)
    config = renamed(
        config,
        _RENAMED,
        rope_theta=attention.get("rope_theta", 10_000.0),
        num_key_value_heads=attention["kv_n_heads"],
        intermediate_size=ffn.get("ffn_hidden_size", 3584),
        hidden_act=(ffn.get("ffn_act_fn") or {}).get("name", "silu"),
    )
    spec = llama_like_spec(
        config,
        max_model_len,
        norm=NormSpec("layer", 1e-5),
        attention={"qkv_clip": attention.get("clip_qkv")},
    )
    moe = moe_spec(
        {**ffn, "hidden_act": config["hidden_act"]},
        config["intermediate_size"],
        routing={"renormalize": True},
    )
    return with_experts(spec, moe)


FAMILIES = (
    Family(
        architectures=("DbrxForCausalLM",),
        spec_from_config=_spec,
        names=Names(
            prefix="transformer.",
            embed="wte",
            norm="norm_f",
            layer="blocks.{}.",
            qkv=("norm_attn_norm.attn.Wqkv",),
            o="norm_attn_norm.attn.out_proj",
            attention_norm="norm_attn_norm.norm_1",
            mlp_norm="norm_attn_norm.norm_2",
            moe=MoeNames(
                router="ffn.router.layer.weight",
                expert=None,
                all_gate_up=("ffn.experts.mlp.w1", "ffn.experts.mlp.v1"),
                all_down="ffn.experts.mlp.w2",
                layout="flat",
            ),
        ),
    ),
)
