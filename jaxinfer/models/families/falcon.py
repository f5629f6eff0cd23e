"""Falcon, in its three forms: one kv head (7B), groups of queries behind two norms (40B, 180B) or one (11B), and ALiBi with
a head's own keys (RW)."""

from __future__ import annotations

from typing import Any

from jaxinfer.models.alibi import alibi_slopes
from jaxinfer.models.checkpoint_layout import Names
from jaxinfer.models.family import Config, Family, llama_like_spec, plain_mlp, renamed
from jaxinfer.models.spec import DecoderSpec, NormPlacement, NormSpec

_FIELDS = {
    "n_embed": "hidden_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_head_kv": "num_kv_heads",
    "ffn_hidden_size": "intermediate_size",
    "activation": "hidden_act",
}


def _read(config: Config) -> dict[str, Any]:
    return renamed(
        config,
        _FIELDS,
        hidden_act="gelu",
        layer_norm_epsilon=1e-5,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        multi_query=True,
        parallel_attn=True,
    )


def _norms(config: Config) -> NormPlacement:
    if config.get("new_decoder_architecture", False):
        two = config.get("num_ln_in_parallel_attn", 2) == 2
        return "parallel" if two else "parallel_shared"
    return "parallel_shared" if config["parallel_attn"] else "pre"


def spec_from_config(config: Config, max_model_len: int | None) -> DecoderSpec:
    config = _read(config)
    num_heads, bias = config["num_attention_heads"], config.get("bias", False)
    num_kv_heads = num_heads
    if config.get("new_decoder_architecture", False):
        num_kv_heads = config.get("num_kv_heads", num_heads)
    elif config["multi_query"]:
        num_kv_heads = 1
    attention: dict[str, Any] = {"qkv_bias": bias, "o_bias": bias, "num_kv_heads": num_kv_heads}
    ropes = None
    if config.get("alibi", False):
        scale = (config["hidden_size"] // num_heads) ** -0.5
        attention["alibi_slopes"] = tuple(scale * slope for slope in alibi_slopes(num_heads))
        ropes = [None] * config["num_hidden_layers"]
    return llama_like_spec(
        config,
        max_model_len,
        attention=attention,
        mlp=plain_mlp(config, bias),
        norm=NormSpec("layer", config["layer_norm_epsilon"], has_bias=True),
        norms=_norms(config),
        ropes=ropes,
    )


def _names(config: Config) -> Names:
    config = _read(config)
    new = config.get("new_decoder_architecture", False)
    stacked = config["multi_query"] and not new
    two_norms = _norms(config) == "parallel"
    return Names(
        prefix="transformer.",
        embed="word_embeddings",
        norm="ln_f",
        layer="h.{}.",
        qkv=("self_attention.query_key_value",),
        qkv_layout="stacked" if stacked else "grouped",
        o="self_attention.dense",
        up="mlp.dense_h_to_4h",
        down="mlp.dense_4h_to_h",
        attention_norm="ln_attn" if two_norms else "input_layernorm",
        mlp_norm="ln_mlp" if two_norms else "post_attention_layernorm",
    )


FAMILIES = (
    Family(
        architectures=("FalconForCausalLM", "RWForCausalLM"),
        spec_from_config=spec_from_config,
        names=_names,
    ),
)
