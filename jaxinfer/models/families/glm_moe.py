"""Ordinary attention with DeepSeek-V3's mixture: GLM-4.5, Solar Open, dots.llm1, K-EXAONE, Hunyuan 3, and Kolibri."""

from __future__ import annotations

from typing import Any

from jaxinfer.models.checkpoint_layout import Names
from jaxinfer.models.families.qwen_moe import SHARED_EXPERT, every_few_layers, qwen3_attention
from jaxinfer.models.family import (
    Config,
    Family,
    config_rope,
    llama_like_spec,
    renamed,
    rms_head_norm,
    sliding_windows,
)
from jaxinfer.models.moe_family import (
    after_dense,
    deepseek_routing,
    moe_spec,
    sparse_layers,
    with_experts,
)
from jaxinfer.models.moe_layout import MoeNames
from jaxinfer.models.spec import DecoderSpec, RopeSpec


def _shared_dim(config: Config, key: str = "n_shared_experts") -> int:
    return config["moe_intermediate_size"] * (config.get(key) or 0)


def _deepseek_moe(config: Config, key: str = "n_shared_experts", **routing: Any):
    return moe_spec(
        config,
        config["moe_intermediate_size"],
        shared_dim=_shared_dim(config, key),
        routing={**deepseek_routing(config), **routing},
    )


def _glm4_moe_spec(config: Config, max_model_len: int | None) -> DecoderSpec:
    config = renamed(config, {}, partial_rotary_factor=0.5, first_k_dense_replace=1)
    attention: dict[str, Any] = {"qkv_bias": config.get("attention_bias", False)}
    if config.get("use_qk_norm"):
        attention["qk_norm"] = rms_head_norm(config.get("rms_norm_eps", 1e-5))
    spec = llama_like_spec(config, max_model_len, attention=attention, norm_eps=1e-5)
    return with_experts(spec, _deepseek_moe(config), after_dense(config))


def _solar_open_spec(config: Config, max_model_len: int | None) -> DecoderSpec:
    config = renamed(config, {}, rope_theta=1e6, head_dim=128, intermediate_size=1)
    bias = config.get("attention_bias", False)
    spec = llama_like_spec(config, max_model_len, attention={"qkv_bias": bias}, norm_eps=1e-5)
    return with_experts(spec, _deepseek_moe(config))


def _dots1_spec(config: Config, max_model_len: int | None) -> DecoderSpec:
    config = renamed(config, {}, norm_topk_prob=False)
    num_layers = config["num_hidden_layers"]
    first, window = config.get("max_window_layers", 62), config.get("sliding_window")
    windows = sliding_windows(config, [window if i >= first else None for i in range(num_layers)])
    spec = llama_like_spec(
        config, max_model_len, windows=windows, attention=qwen3_attention(config)
    )
    return with_experts(spec, _deepseek_moe(config), after_dense(config))


def _windowed_rope(
    config: Config, max_model_len: int | None, windows: list[int | None]
) -> list[RopeSpec | None]:
    """By layer: only those with a window are rotated, unless there is none at all."""
    rope, _ = config_rope(config, max_model_len)
    if config.get("sliding_window") is None:
        return [rope] * len(windows)
    return [None if window is None else rope for window in windows]


def _exaone_moe_spec(config: Config, max_model_len: int | None) -> DecoderSpec:
    config = renamed(config, {}, first_k_dense_replace=1)
    num_layers, pattern = config["num_hidden_layers"], config.get("sliding_window_pattern", 4)
    if isinstance(pattern, str):
        full = [pattern[i % len(pattern)] == "G" for i in range(num_layers)]
    else:
        full = [(i + 1) % pattern == 0 for i in range(num_layers)]
    full[-1] = True
    windows = sliding_windows(
        config, [None if is_full else config.get("sliding_window") for is_full in full]
    )
    spec = llama_like_spec(
        config,
        max_model_len,
        norm_eps=1e-5,
        windows=windows,
        ropes=_windowed_rope(config, max_model_len, windows),
        attention={"qk_norm": rms_head_norm(config.get("rms_norm_eps", 1e-5))},
    )
    moe = _deepseek_moe(config, "num_shared_experts")
    return with_experts(spec, moe, sparse_layers(config, after_dense(config)))


def _hy_v3_spec(config: Config, max_model_len: int | None) -> DecoderSpec:
    config = renamed(
        config,
        {"router_scaling_factor": "routed_scaling_factor"},
        first_k_dense_replace=1,
        rope_theta=11_158_840.0,
        head_dim=128,
    )
    spec = llama_like_spec(
        config,
        max_model_len,
        norm_eps=1e-5,
        mlp_bias=config.get("mlp_bias", False),
        attention=qwen3_attention({"rms_norm_eps": 1e-5, **config}),
    )
    moe = _deepseek_moe(config, "num_shared_experts")
    return with_experts(spec, moe, sparse_layers(config, after_dense(config)))


def _kolibri1_spec(config: Config, max_model_len: int | None) -> DecoderSpec:
    config = renamed(config, {}, intermediate_size=1, sliding_window=513, head_dim=128)
    num_layers = config["num_hidden_layers"]
    windows = sliding_windows(
        config,
        [None if (i + 1) % 5 == 0 else config["sliding_window"] for i in range(num_layers)],
    )
    spec = llama_like_spec(
        config,
        max_model_len,
        norms="both",
        windows=windows,
        ropes=_windowed_rope(config, max_model_len, windows),
        attention={"qk_norm": rms_head_norm(config.get("rms_norm_eps", 1e-6))},
    )
    moe = moe_spec(
        config,
        config["moe_intermediate_size"],
        shared_dim=config.get("shared_expert_intermediate_size", 512),
        routing={
            "scores": "sigmoid",
            "correction_bias": "logits",
            "renormalize": config.get("norm_topk_prob", False),
            "float32": True,
        },
    )
    return with_experts(spec, moe)


def _flint_spec(config: Config, max_model_len: int | None) -> DecoderSpec:
    config = renamed(config, {}, sliding_window=513, mlp_only_layers=(0, 1), head_dim=128)
    num_layers = config["num_hidden_layers"]
    full = [i < 2 or i % 4 == 1 or i == num_layers - 1 for i in range(num_layers)]
    windows = sliding_windows(
        config, [None if is_full else config["sliding_window"] for is_full in full]
    )
    spec = llama_like_spec(
        config,
        max_model_len,
        windows=windows,
        ropes=_windowed_rope(config, max_model_len, windows),
        attention=qwen3_attention(config, sinks=True),
    )
    moe = moe_spec(
        config,
        config["moe_intermediate_size"],
        shared_dim=config.get("shared_expert_intermediate_size", 1024),
        routing={
            "scores": "sigmoid",
            "renormalize": config.get("norm_topk_prob", True),
            "float32": True,
        },
    )
    return with_experts(spec, moe, every_few_layers(config))


def _glm4_moe_names(config: Config) -> Names:
    if config.get("model_type") != "sarvam_moe":
        return Names()
    return Names(
        embed="word_embeddings",
        qkv=("attention.query_key_value",),
        o="attention.dense",
        q_norm="attention.query_layernorm",
        k_norm="attention.key_layernorm",
        moe=MoeNames(correction_bias="mlp.gate.expert_bias"),
    )


FAMILIES = (
    Family(
        architectures=("Glm4MoeForCausalLM",),
        spec_from_config=_glm4_moe_spec,
        names=_glm4_moe_names,
        further_layers=True,
    ),
    Family(architectures=("SolarOpenForCausalLM",), spec_from_config=_solar_open_spec),
    Family(architectures=("Dots1ForCausalLM",), spec_from_config=_dots1_spec),
    Family(
        architectures=("ExaoneMoeForCausalLM",),
        spec_from_config=_exaone_moe_spec,
        names=Names(moe=MoeNames(correction_bias="mlp.e_score_correction_bias")),
        other_tensors=(r"mtp\..*",),
    ),
    Family(
        architectures=("HYV3ForCausalLM",),
        spec_from_config=_hy_v3_spec,
        names=Names(
            moe=MoeNames(
                router="mlp.router.gate.weight",
                correction_bias="mlp.expert_bias",
                shared_gate_up=(
                    "mlp.shared_mlp.gate_proj.weight",
                    "mlp.shared_mlp.up_proj.weight",
                ),
                shared_down="mlp.shared_mlp.down_proj.weight",
            )
        ),
        further_layers=True,
    ),
    Family(
        architectures=("Kolibri1ForCausalLM",),
        spec_from_config=_kolibri1_spec,
        names=Names(
            attention_post_norm="post_attn_norm",
            mlp_post_norm="post_ffn_norm",
            moe=MoeNames(correction_bias="moe.router.expert_bias"),
        ),
    ),
    Family(
        architectures=("FlintForCausalLM",),
        spec_from_config=_flint_spec,
        names=Names(sinks="self_attn.softmax_offset", moe=SHARED_EXPERT),
    ),
)
