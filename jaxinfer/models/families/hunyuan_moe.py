"""Tencent's HunYuan with experts, of which layers may take different numbers."""

from __future__ import annotations

from jaxinfer.models.checkpoint_layout import Names
from jaxinfer.models.families.hunyuan import (
    HUNYUAN_NORM_NAMES,
    hunyuan_attention,
    hunyuan_config,
)
from jaxinfer.models.family import Config, Family, llama_like_spec
from jaxinfer.models.moe_family import moe_spec, with_experts
from jaxinfer.models.moe_layout import MoeNames
from jaxinfer.models.spec import DecoderSpec


def _hunyuan_spec(config: Config, max_model_len: int | None) -> DecoderSpec:
    config = hunyuan_config(config)
    if not isinstance(config["num_experts"], int):
        raise ValueError(
            f"num_experts by layer ({config['num_experts']}) is not supported; supported: one number."
        )
    per_token, num_layers = config.get("moe_topk", 1), config["num_hidden_layers"]
    if isinstance(per_token, int):
        per_token = [per_token] * num_layers
    mixtures = [
        moe_spec(
            {**config, "moe_topk": count, "num_experts_per_tok": None},
            config["intermediate_size"],
            shared_dim=config["intermediate_size"],
            routing={"renormalize": True, "float32": True},
        )
        for count in per_token
    ]
    spec = llama_like_spec(config, max_model_len, attention=hunyuan_attention(config))
    return with_experts(spec, mixtures)


FAMILIES = (
    Family(
        architectures=("HunYuanMoEV1ForCausalLM",),
        spec_from_config=_hunyuan_spec,
        names=Names(
            **HUNYUAN_NORM_NAMES,
            moe=MoeNames(
                router="mlp.gate.wg.weight",
                shared_gate_up=(
                    "mlp.shared_mlp.gate_proj.weight",
                    "mlp.shared_mlp.up_proj.weight",
                ),
                shared_down="mlp.shared_mlp.down_proj.weight",
            ),
        ),
    ),
)
