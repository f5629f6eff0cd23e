"""Qwen's mixtures, and JetBrains' Mellum."""

from __future__ import annotations

from typing import Any

from jaxinfer.models.checkpoint_layout import Names
from jaxinfer.models.family import (
    Config,
    Family,
    layer_type_ropes,
    llama_like_spec,
    qwen_windows,
    renamed,
    rms_head_norm,
    sliding_windows,
)
from jaxinfer.models.moe_family import moe_spec, sparse_layers, with_experts
from jaxinfer.models.moe_layout import MoeNames
from jaxinfer.models.spec import DecoderSpec

SHARED_EXPERT = MoeNames(
    shared_gate_up=("mlp.shared_expert.gate_proj.weight", "mlp.shared_expert.up_proj.weight"),
    shared_down="mlp.shared_expert.down_proj.weight",
)


def every_few_layers(config: Config) -> list[bool]:
    """A mixture in every `decoder_sparse_step`-th layer that is not one of `mlp_only_layers`."""
    step, dense = config.get("decoder_sparse_step", 1), config.get("mlp_only_layers") or ()
    return [i not in dense and (i + 1) % step == 0 for i in range(config["num_hidden_layers"])]


def qwen3_attention(config: Config, **more: Any) -> dict[str, Any]:
    bias = config.get("attention_bias", False)
    norm = rms_head_norm(config.get("rms_norm_eps", 1e-6))
    return {"qkv_bias": bias, "o_bias": bias, "qk_norm": norm, **more}


def _qwen2_moe_spec(config: Config, max_model_len: int | None) -> DecoderSpec:
    config = renamed(config, {})
    windows = qwen_windows(config)
    if config.get("use_sliding_window") and "layer_types" not in config:
        below, window = config.get("max_window_layers", 28), config.get("sliding_window", 4096)
        num_layers = config["num_hidden_layers"]
        windows = [window if (i + 1) % 2 and i < below else None for i in range(num_layers)]
    spec = llama_like_spec(
        config,
        max_model_len,
        windows=windows,
        attention={"qkv_bias": config.get("qkv_bias", True)},
    )
    moe = moe_spec(
        config,
        config["moe_intermediate_size"],
        shared_dim=config["shared_expert_intermediate_size"],
        shared_gate=True,
        routing={"renormalize": config.get("norm_topk_prob", False)},
    )
    return with_experts(spec, moe, every_few_layers(config))


def _qwen3_moe_spec(config: Config, max_model_len: int | None) -> DecoderSpec:
    config = renamed(config, {})
    window = config.get("sliding_window", 4096) if config.get("use_sliding_window") else None
    spec = llama_like_spec(
        config,
        max_model_len,
        windows=[window] * config["num_hidden_layers"],
        attention=qwen3_attention(config),
    )
    routing = {"renormalize": config.get("norm_topk_prob", False)}
    moe = moe_spec(config, config["moe_intermediate_size"], routing=routing)
    return with_experts(spec, moe, every_few_layers(config))


def _mellum_spec(config: Config, max_model_len: int | None) -> DecoderSpec:
    config = renamed(config, {}, sliding_window=1024)
    num_layers = config["num_hidden_layers"]
    windows = sliding_windows(config, [None] * num_layers)
    spec = llama_like_spec(
        config,
        max_model_len,
        windows=windows,
        ropes=layer_type_ropes(config, max_model_len, windows),
        attention=qwen3_attention(config),
    )
    routing = {"renormalize": config.get("norm_topk_prob", True)}
    moe = moe_spec(config, config["moe_intermediate_size"], routing=routing)
    return with_experts(spec, moe, sparse_layers(config, [True] * num_layers))


FAMILIES = (
    Family(
        architectures=("Qwen2MoeForCausalLM",),
        spec_from_config=_qwen2_moe_spec,
        names=Names(moe=SHARED_EXPERT),
    ),
    Family(architectures=("Qwen3MoeForCausalLM",), spec_from_config=_qwen3_moe_spec),
    Family(
        architectures=("MellumForCausalLM",),
        spec_from_config=_mellum_spec,
        other_tensors=(r"mtp\..*",),
    ),
)
