"""EleutherAI's GPT-NeoX and Pythia, and its Japanese relative: attention and MLP side by side or in turn."""

from __future__ import annotations

from dataclasses import replace

from jaxinfer.models.checkpoint_layout import Names, decoder_plan
from jaxinfer.models.family import Config, Family, llama_like_spec, plain_mlp, renamed
from jaxinfer.models.sharded_dims import ShardedDims
from jaxinfer.models.spec import DecoderSpec, NormSpec
from jaxinfer.weights.plan import LeafSource, LoadPlan

_FIELDS = {"rotary_pct": "partial_rotary_factor", "rotary_emb_base": "rope_theta"}

_NAMES = Names(
    prefix="gpt_neox.",
    embed="embed_in",
    norm="final_layer_norm",
    head="embed_out",
    qkv=("attention.query_key_value",),
    qkv_layout="grouped",
    o="attention.dense",
    up="mlp.dense_h_to_4h",
    down="mlp.dense_4h_to_h",
)


def _neox_spec(config: Config, max_model_len: int | None) -> DecoderSpec:
    config = renamed(
        config, _FIELDS, hidden_act="gelu", layer_norm_eps=1e-5, partial_rotary_factor=0.25
    )
    bias = config.get("attention_bias", True)
    return llama_like_spec(
        config,
        max_model_len,
        attention={"qkv_bias": bias, "o_bias": bias},
        mlp=plain_mlp(config),
        norm=NormSpec("layer", config["layer_norm_eps"], has_bias=True),
        norms="parallel" if config.get("use_parallel_residual", True) else "pre",
    )


def _japanese_spec(config: Config, max_model_len: int | None) -> DecoderSpec:
    config = renamed(
        config,
        _FIELDS,
        hidden_act="gelu",
        layer_norm_eps=1e-5,
        partial_rotary_factor=1.0,
        tie_word_embeddings=True,
        intermediate_multiple_size=4,
    )
    config["intermediate_size"] = int(config["hidden_size"] * config["intermediate_multiple_size"])
    spec = llama_like_spec(
        config,
        max_model_len,
        mlp=plain_mlp(config, bias=False),
        norm=NormSpec("layer", config["layer_norm_eps"], has_bias=True),
    )
    *layers, last = spec.layers
    return replace(
        spec, layers=(*layers, replace(last, attention=replace(last.attention, o_bias=True)))
    )


def _japanese_plan(config: Config, spec: DecoderSpec, dims: ShardedDims) -> LoadPlan:
    plan = decoder_plan(spec, dims, replace(_NAMES, prefix="gpt_neox_japanese."))
    last = len(spec.layers) - 1
    plan["layers", str(last), "attention", "o_bias"] = LeafSource(
        (f"gpt_neox_japanese.layers.{last}.attention.dense_bias",), ((spec.embed_dim,),)
    )
    return plan


FAMILIES = (
    Family(
        architectures=("GPTNeoXForCausalLM",),
        spec_from_config=_neox_spec,
        names=_NAMES,
        other_tensors=(r".*\.attention\.(masked_)?bias", r".*\.attention\.rotary_emb\.inv_freq"),
    ),
    Family(
        architectures=("GPTNeoXJapaneseForCausalLM",),
        spec_from_config=_japanese_spec,
        checkpoint_plan=_japanese_plan,
    ),
)
