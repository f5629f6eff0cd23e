"""MosaicML's MPT: ALiBi, no biases at all."""

from __future__ import annotations

from jaxinfer.models.alibi import alibi_slopes
from jaxinfer.models.checkpoint_layout import Names
from jaxinfer.models.family import Config, Family, llama_like_spec, plain_mlp, refuse, renamed
from jaxinfer.models.spec import DecoderSpec, NormSpec

_FIELDS = {
    "d_model": "hidden_size",
    "n_heads": "num_attention_heads",
    "n_layers": "num_hidden_layers",
    "max_seq_len": "max_position_embeddings",
}


def spec_from_config(config: Config, max_model_len: int | None) -> DecoderSpec:
    attention = config.get("attn_config") or {}
    refuse(config, no_bias=True, logit_scale=None, embedding_fraction=1.0)
    refuse(attention, attn_type="multihead_attention", prefix_lm=False, qk_ln=False, alibi=True)
    config = renamed(
        config,
        _FIELDS,
        hidden_act="gelu",
        layer_norm_epsilon=1e-5,
        tie_word_embeddings=True,
        expansion_ratio=4,
    )
    config["intermediate_size"] = config["expansion_ratio"] * config["hidden_size"]
    num_heads = config["num_attention_heads"]
    options = {"alibi_slopes": alibi_slopes(num_heads, attention.get("alibi_bias_max", 8))}
    if attention.get("softmax_scale") is not None:
        options["query_scale"] = attention["softmax_scale"]
    return llama_like_spec(
        config,
        max_model_len,
        attention=options | {"qkv_clip": attention.get("clip_qkv")},
        mlp=plain_mlp(config, bias=False),
        norm=NormSpec("layer", config["layer_norm_epsilon"]),
        ropes=[None] * config["num_hidden_layers"],
    )


FAMILIES = (
    Family(
        architectures=("MptForCausalLM", "MPTForCausalLM"),
        spec_from_config=spec_from_config,
        names=Names(
            prefix="transformer.",
            embed="wte",
            norm="norm_f",
            layer="blocks.{}.",
            qkv=("attn.Wqkv",),
            o="attn.out_proj",
            up="ffn.up_proj",
            down="ffn.down_proj",
            attention_norm="norm_1",
            mlp_norm="norm_2",
        ),
    ),
)
