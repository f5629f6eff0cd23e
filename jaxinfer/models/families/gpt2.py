"""OpenAI's GPTs, and StarCoder's first version in their form: learned positions, layer norms, plain MLPs."""

from __future__ import annotations

from dataclasses import replace

from jaxinfer.models.checkpoint_layout import Names
from jaxinfer.models.family import Config, Family, llama_like_spec, plain_mlp, refuse, renamed
from jaxinfer.models.spec import DecoderSpec, LearnedPositions, NormSpec

GPT_FIELDS = {
    "n_embd": "hidden_size",
    "n_head": "num_attention_heads",
    "n_inner": "intermediate_size",
    "n_layer": "num_hidden_layers",
    "n_positions": "max_position_embeddings",
    "activation_function": "hidden_act",
    "afn": "hidden_act",
}
"""What the configs of these models call things."""

_BUFFERS = (r".*\.attn\.(masked_)?bias",)
"""Causal masks."""


def _gpt_spec(config: Config, max_model_len: int | None, **features) -> DecoderSpec:
    num_layers = config["num_hidden_layers"]
    return llama_like_spec(
        config,
        max_model_len,
        mlp=plain_mlp(config),
        norm=NormSpec("layer", config["layer_norm_epsilon"], has_bias=True),
        ropes=[None] * num_layers,
        positions=LearnedPositions(config["max_position_embeddings"]),
        **features,
    )


def _gpt2_spec(config: Config, max_model_len: int | None) -> DecoderSpec:
    refuse(config, add_cross_attention=False)
    config = renamed(
        config,
        GPT_FIELDS,
        hidden_act="gelu_new",
        layer_norm_epsilon=1e-5,
        tie_word_embeddings=True,
    )
    num_kv_heads = 1 if config.get("multi_query", False) else config["num_attention_heads"]
    attention = {"qkv_bias": True, "o_bias": True, "num_kv_heads": num_kv_heads}
    if not config.get("scale_attn_weights", True):
        attention["query_scale"] = 1.0
    spec = _gpt_spec(config, max_model_len, attention=attention)
    if not config.get("scale_attn_by_inverse_layer_idx", False):
        return spec
    return replace(
        spec,
        layers=tuple(
            replace(
                layer,
                attention=replace(
                    layer.attention, query_scale=layer.attention.query_scale / (i + 1)
                ),
            )
            for i, layer in enumerate(spec.layers)
        ),
    )


def _bigcode_spec(config: Config, max_model_len: int | None) -> DecoderSpec:
    return _gpt2_spec(
        renamed(config, {"activation_function": "hidden_act"}, hidden_act="gelu_pytorch_tanh")
        | {"multi_query": config.get("multi_query", True)},
        max_model_len,
    )


def _gpt1_spec(config: Config, max_model_len: int | None) -> DecoderSpec:
    config = renamed(
        config, GPT_FIELDS, hidden_act="gelu", layer_norm_epsilon=1e-5, tie_word_embeddings=True
    )
    if config["hidden_act"] == "gelu":
        config["hidden_act"] = "gelu_new"  # what this model has always meant by it
    return _gpt_spec(
        config,
        max_model_len,
        attention={"qkv_bias": True, "o_bias": True},
        norms="sum",
        final_norm=False,
    )


_GPT2_NAMES = Names(
    prefix="transformer.",
    embed="wte",
    positions="wpe",
    norm="ln_f",
    layer="h.{}.",
    qkv=("attn.c_attn",),
    o="attn.c_proj",
    up="mlp.c_fc",
    down="mlp.c_proj",
    attention_norm="ln_1",
    mlp_norm="ln_2",
    transposed=True,
)


def _bigcode_names(config: Config) -> Names:
    layout = "stacked" if config.get("multi_query", True) else "grouped"
    return replace(_GPT2_NAMES, transposed=False, qkv_layout=layout)


FAMILIES = (
    Family(
        architectures=("GPT2LMHeadModel",),
        spec_from_config=_gpt2_spec,
        names=_GPT2_NAMES,
        other_tensors=_BUFFERS,
    ),
    Family(
        architectures=("GPTBigCodeForCausalLM",),
        spec_from_config=_bigcode_spec,
        names=_bigcode_names,
        other_tensors=_BUFFERS,
    ),
    Family(
        architectures=("OpenAIGPTLMHeadModel",),
        spec_from_config=_gpt1_spec,
        names=replace(
            _GPT2_NAMES,
            embed="tokens_embed",
            positions="positions_embed",
            attention_post_norm="ln_1",
            mlp_post_norm="ln_2",
        ),
        other_tensors=_BUFFERS,
    ),
)
