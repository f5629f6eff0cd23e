"""Decoders in fairseq's form: OPT, BioGPT and XGLM. Absolute positions, which begin at row 2."""

from __future__ import annotations

import math

from jaxinfer.models.checkpoint_layout import Names
from jaxinfer.models.family import Config, Family, llama_like_spec, plain_mlp, refuse, renamed
from jaxinfer.models.spec import (
    DecoderSpec,
    LearnedPositions,
    NormSpec,
    SinusoidalPositions,
)

_FIELDS = {
    "ffn_dim": "intermediate_size",
    "activation_function": "hidden_act",
    "d_model": "hidden_size",
    "num_layers": "num_hidden_layers",
    "attention_heads": "num_attention_heads",
}
_OFFSET = 2


def _spec(config: Config, max_model_len: int | None, *, bias: bool = True, **features):
    attention = {"qkv_bias": bias, "o_bias": bias}
    ropes = [None] * config["num_hidden_layers"]
    options = {"norm": NormSpec("layer", 1e-5, has_bias=True)} | features
    return llama_like_spec(
        config,
        max_model_len,
        attention=attention,
        mlp=plain_mlp(config, bias),
        ropes=ropes,
        **options,
    )


def _learned(config: Config) -> LearnedPositions:
    return LearnedPositions(config["max_position_embeddings"] + _OFFSET, _OFFSET)


def _embed_scale(config: Config) -> float | None:
    return math.sqrt(config["hidden_size"]) if config.get("scale_embedding", True) else None


def _opt_spec(config: Config, max_model_len: int | None) -> DecoderSpec:
    config = renamed(config, _FIELDS, hidden_act="relu", tie_word_embeddings=True)
    refuse(config, word_embed_proj_dim=config["hidden_size"])
    before = config.get("do_layer_norm_before", True)
    affine = config.get("layer_norm_elementwise_affine", True)
    return _spec(
        config,
        max_model_len,
        bias=config.get("enable_bias", True),
        norm=NormSpec("layer", 1e-5, has_weight=affine, has_bias=affine),
        norms="pre" if before else "sum",
        final_norm=before and not config.get("_remove_final_layer_norm", False),
        positions=_learned(config),
    )


def _biogpt_spec(config: Config, max_model_len: int | None) -> DecoderSpec:
    config = renamed(config, {}, hidden_act="gelu", tie_word_embeddings=True)
    return _spec(
        config, max_model_len, positions=_learned(config), embed_scale=_embed_scale(config)
    )


def _xglm_spec(config: Config, max_model_len: int | None) -> DecoderSpec:
    config = renamed(config, _FIELDS, hidden_act="gelu", tie_word_embeddings=True)
    refuse(config, add_cross_attention=False)
    half = config["hidden_size"] // 2
    frequencies = tuple(10000.0 ** (-i / (half - 1)) for i in range(half))
    return _spec(
        config,
        max_model_len,
        positions=SinusoidalPositions(frequencies, _OFFSET),
        embed_scale=_embed_scale(config),
    )


def _names(prefix: str, norm: str, head: str = "lm_head") -> Names:
    return Names(
        prefix=prefix,
        norm=norm,
        head=head,
        o="self_attn.out_proj",
        up="fc1",
        down="fc2",
        attention_norm="self_attn_layer_norm",
        attention_post_norm="self_attn_layer_norm",
        mlp_norm="final_layer_norm",
        mlp_post_norm="final_layer_norm",
    )


FAMILIES = (
    Family(
        architectures=("OPTForCausalLM",),
        spec_from_config=_opt_spec,
        names=_names("model.decoder.", "final_layer_norm"),
    ),
    Family(
        architectures=("BioGptForCausalLM",),
        spec_from_config=_biogpt_spec,
        names=_names("biogpt.", "layer_norm", head="output_projection"),
    ),
    Family(
        architectures=("XGLMForCausalLM",),
        spec_from_config=_xglm_spec,
        names=_names("model.", "layer_norm"),
        other_tensors=(r"model\.embed_positions\.weights",),
    ),
)
