"""Tencent's HunYuan (dense): norms of query and key heads after the rotation, and a rotary base stretched by `alpha`."""

from __future__ import annotations

from typing import Any

from jaxinfer.models.checkpoint_layout import Names
from jaxinfer.models.family import Config, Family, head_dim, llama_like_spec, renamed
from jaxinfer.models.rope_config import rope_parameters
from jaxinfer.models.spec import DecoderSpec, NormSpec, QKNormSpec

HUNYUAN_NORM_NAMES = {
    "q_norm": "self_attn.query_layernorm",
    "k_norm": "self_attn.key_layernorm",
}


def hunyuan_config(config: Config) -> dict[str, Any]:
    """With the rotary type that "dynamic" and `alpha` come down to."""
    config = renamed(config, {}, rms_norm_eps=1e-5)
    parameters = rope_parameters(config)
    if parameters["rope_type"] == "dynamic" and parameters.get("alpha"):
        dim = head_dim(config)
        theta = parameters["rope_theta"] * parameters["alpha"] ** (dim / (dim - 2))
        config["rope_parameters"] = {"rope_type": "default", "rope_theta": theta}
        config.pop("rope_scaling", None)
    return config


def hunyuan_attention(config: Config) -> dict[str, Any]:
    bias = config.get("attention_bias", False)
    norm = NormSpec("rms", config["rms_norm_eps"])
    return {"qkv_bias": bias, "o_bias": bias, "qk_norm": QKNormSpec(norm, after_rope=True)}


def spec_from_config(config: Config, max_model_len: int | None) -> DecoderSpec:
    config = hunyuan_config(config)
    return llama_like_spec(config, max_model_len, attention=hunyuan_attention(config))


FAMILIES = (
    Family(
        architectures=("HunYuanDenseV1ForCausalLM",),
        spec_from_config=spec_from_config,
        names=Names(**HUNYUAN_NORM_NAMES),
    ),
)
