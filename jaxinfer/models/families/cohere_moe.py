"""Cohere's Command with experts: attention and mixture side by side behind one norm."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from jaxinfer.models.checkpoint_layout import Names
from jaxinfer.models.family import (
    Config,
    Family,
    activation,
    config_rope,
    llama_like_spec,
    renamed,
    sliding_windows,
)
from jaxinfer.models.moe_family import moe_spec, sparse_layers, with_experts
from jaxinfer.models.spec import DecoderSpec, GatedMlpSpec, NormSpec

_DEFAULTS: dict[str, Any] = {
    "layer_norm_eps": 1e-5,
    "logit_scale": 0.0625,
    "tie_word_embeddings": True,
    "sliding_window": 4096,
    "sliding_window_pattern": 4,
    "prefix_dense_sliding_window_pattern": 1,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "num_shared_experts": 0,
    "shared_expert_combination_strategy": "average",
    "expert_selection_fn": "softmax",
    "norm_topk_prob": True,
}


def _spec(config: Config, max_model_len: int | None) -> DecoderSpec:
    config = renamed(config, {}, **_DEFAULTS)
    num_layers, first = config["num_hidden_layers"], config.get("first_k_dense_replace", 0)
    prefix, pattern = (
        config["prefix_dense_sliding_window_pattern"],
        config["sliding_window_pattern"],
    )
    full = [
        (i + 1) % prefix == 0 if i < first else (i - first + 1) % pattern == 0
        for i in range(num_layers)
    ]
    windows = sliding_windows(
        config, [None if is_full else config["sliding_window"] for is_full in full]
    )
    sparse = sparse_layers(config, [i >= first for i in range(num_layers)])
    rope, _ = config_rope(config, max_model_len)
    norm = NormSpec("layer", config["layer_norm_eps"])
    if "rms_norm_eps" in config:
        norm = NormSpec("rms", config["rms_norm_eps"])
    bias = config.get("attention_bias", False)
    spec = llama_like_spec(
        config,
        max_model_len,
        mlp=GatedMlpSpec(
            config.get("prefix_dense_intermediate_size") or config["intermediate_size"],
            activation(config),
        ),
        norm=norm,
        norms="parallel_shared",
        logit_scale=config["logit_scale"],
        windows=windows,
        # Without a window only dense layers at the beginning are rotated, where all of these attend fully.
        ropes=[
            rope if window is not None or (prefix == 1 and not is_sparse) else None
            for window, is_sparse in zip(windows, sparse, strict=True)
        ],
        attention={"qkv_bias": bias, "o_bias": bias},
    )
    return with_experts(spec, _mixture(config), sparse)


def _mixture(config: Config):
    scores, combination = (
        config["expert_selection_fn"],
        config["shared_expert_combination_strategy"],
    )
    for name, value, known in (
        ("expert_selection_fn", scores, ("softmax", "sigmoid")),
        ("shared_expert_combination_strategy", combination, ("sum", "average")),
    ):
        if value not in known:
            raise ValueError(f"{name} {value!r} is not supported; supported: {list(known)}.")
    shared_dim = config["intermediate_size"] * config["num_shared_experts"]
    halved = bool(shared_dim) and combination == "average"
    moe = moe_spec(
        config,
        config["intermediate_size"],
        shared_dim=shared_dim,
        routing={"scores": scores, "renormalize": scores == "softmax" or config["norm_topk_prob"]},
        shared_scale=0.5 if halved else 1.0,
    )
    if not halved:
        return moe
    return replace(moe, routing=replace(moe.routing, scale=0.5))


FAMILIES = (
    Family(
        architectures=("Cohere2MoeForCausalLM",),
        spec_from_config=_spec,
        names=Names(interleaved_rope=True),
    ),
)
