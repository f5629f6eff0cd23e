"""BLOOM: ALiBi, and a norm of the embedded tokens."""

from __future__ import annotations

from jaxinfer.models.alibi import alibi_slopes
from jaxinfer.models.checkpoint_layout import Names
from jaxinfer.models.family import Config, Family, llama_like_spec, plain_mlp, refuse, renamed
from jaxinfer.models.spec import DecoderSpec, NormSpec

_FIELDS = {
    "n_embed": "hidden_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "num_attention_heads": "num_attention_heads",
    "seq_length": "max_position_embeddings",
}
_TRAINED_POSITIONS = 2048
"""Configs give no limit; ALiBi has none."""


def spec_from_config(config: Config, max_model_len: int | None) -> DecoderSpec:
    refuse(config, apply_residual_connection_post_layernorm=False)
    config = renamed(
        config,
        _FIELDS,
        hidden_act="gelu_pytorch_tanh",
        layer_norm_epsilon=1e-5,
        max_position_embeddings=_TRAINED_POSITIONS,
        tie_word_embeddings=True,
    )
    return llama_like_spec(
        config,
        max_model_len,
        attention={
            "qkv_bias": True,
            "o_bias": True,
            "alibi_slopes": alibi_slopes(config["num_attention_heads"]),
        },
        mlp=plain_mlp(config),
        norm=NormSpec("layer", config["layer_norm_epsilon"], has_bias=True),
        ropes=[None] * config["num_hidden_layers"],
        embed_norm=True,
    )


FAMILIES = (
    Family(
        architectures=("BloomForCausalLM",),
        spec_from_config=spec_from_config,
        names=Names(
            prefix="transformer.",
            embed="word_embeddings",
            embed_norm="word_embeddings_layernorm",
            norm="ln_f",
            layer="h.{}.",
            qkv=("self_attention.query_key_value",),
            qkv_layout="grouped",
            o="self_attention.dense",
            up="mlp.dense_h_to_4h",
            down="mlp.dense_4h_to_h",
        ),
    ),
)
