"""Multi-head latent attention: DeepSeek-V2 and V3 with their mixtures of experts, GLM-4.7-Flash, Youtu and MiniCPM3;
and DeepSeek-V3.2 and GLM-5 as far as their sparse attention sees everything."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from jaxinfer.models.checkpoint_layout import Names
from jaxinfer.models.family import Config, Family, llama_like_spec, refuse, renamed
from jaxinfer.models.latent_spec import LatentAttentionSpec
from jaxinfer.models.moe_family import (
    after_dense,
    deepseek_routing,
    moe_spec,
    sparse_layers,
    with_experts,
)
from jaxinfer.models.rope_config import rope_parameters, rope_spec
from jaxinfer.models.spec import DecoderSpec, NormSpec


def latent_decoder_spec(config: Config, max_model_len: int | None, **features: Any) -> DecoderSpec:
    """A decoder with latent attention and an MLP of `intermediate_size`; `features` as for `llama_like_spec`."""
    plain, rotated = config["qk_nope_head_dim"], config["qk_rope_head_dim"]
    spec = llama_like_spec({**config, "head_dim": rotated}, max_model_len, **features)
    parameters = rope_parameters(config)
    attention = LatentAttentionSpec(
        num_heads=config["num_attention_heads"],
        query_rank=config.get("q_lora_rank"),
        latent_rank=config["kv_lora_rank"],
        plain_dim=plain,
        rope_dim=rotated,
        value_dim=config["v_head_dim"],
        query_scale=(plain + rotated) ** -0.5 * _score_factor(parameters),
        rope=rope_spec(
            parameters,
            rotated,
            config["max_position_embeddings"],
            max_model_len or spec.max_position_embeddings,
        ),
        norm=NormSpec("rms", 1e-6),
        bias=config.get("attention_bias", False),
    )
    layers = tuple(replace(layer, attention=attention) for layer in spec.layers)
    return replace(spec, layers=layers)


def _score_factor(parameters: Config) -> float:
    """What a stretched rotary embedding adds to the scores' scale."""
    mscale, factor = parameters.get("mscale_all_dim"), parameters.get("factor") or 1.0
    if parameters["rope_type"] == "default" or not mscale or factor <= 1:
        return 1.0
    return (0.1 * mscale * math.log(factor) + 1.0) ** 2


def _shared_dim(config: Config) -> int:
    return config["moe_intermediate_size"] * (config.get("n_shared_experts") or 0)


def _deepseek_v2_spec(config: Config, max_model_len: int | None) -> DecoderSpec:
    config = renamed(config, {}, topk_method="greedy")
    refuse(config, moe_layer_freq=1, norm_topk_prob=False)
    method = config["topk_method"]
    routing: dict[str, Any] = {"scale": config.get("routed_scaling_factor", 1.0), "float32": True}
    if method == "group_limited_greedy":
        routing |= {
            "num_groups": config["n_group"],
            "groups_per_token": config["topk_group"],
            "group_score": "best",
        }
    elif method != "greedy":
        raise ValueError(
            f"topk_method {method!r} is not supported; supported: ['greedy', 'group_limited_greedy']."
        )
    moe = moe_spec(
        config,
        config["moe_intermediate_size"],
        shared_dim=_shared_dim(config),
        routing=routing,
    )
    return with_experts(latent_decoder_spec(config, max_model_len), moe, after_dense(config))


def _deepseek_v3_spec(config: Config, max_model_len: int | None) -> DecoderSpec:
    given, config = config, renamed(config, {})
    # Queries that come from the token itself have a rank of null.
    config["q_lora_rank"] = given.get("q_lora_rank", 1536)
    refuse(config, moe_layer_freq=1, topk_method="noaux_tc", scoring_func="sigmoid")
    moe = moe_spec(
        config,
        config["moe_intermediate_size"],
        shared_dim=_shared_dim(config),
        routing=deepseek_routing(config),
    )
    sparse = sparse_layers(config, after_dense(config, default=3))
    return with_experts(latent_decoder_spec(config, max_model_len), moe, sparse)


def _indexed_spec(config: Config, max_model_len: int | None) -> DecoderSpec:
    """DeepSeek-V3.2 and GLM-5: an index chooses `index_topk` tokens to attend to, which is all of a context of so many."""
    longest = max_model_len or config["max_position_embeddings"]
    if longest > (chosen := config.get("index_topk", 2048)):
        raise ValueError(
            f"max_model_len must be at most index_topk ({chosen}) for this model, got {longest}: sparse attention is "
            f"not supported."
        )
    return _deepseek_v3_spec(config, max_model_len)


def _glm4_moe_lite_spec(config: Config, max_model_len: int | None) -> DecoderSpec:
    return _deepseek_v3_spec({"first_k_dense_replace": 1, **config}, max_model_len)


def _youtu_spec(config: Config, max_model_len: int | None) -> DecoderSpec:
    defaults = {"tie_word_embeddings": True}
    given, config = config, renamed(config, {}, **defaults)
    config["q_lora_rank"] = given.get("q_lora_rank", 1536)
    return latent_decoder_spec(config, max_model_len)


def _minicpm3_spec(config: Config, max_model_len: int | None) -> DecoderSpec:
    config = renamed(
        config, {}, scale_emb=1, dim_model_base=config["hidden_size"], tie_word_embeddings=True
    )
    num_layers, heads = config["num_hidden_layers"], config["num_attention_heads"]
    config.setdefault("v_head_dim", config["hidden_size"] // heads)
    return latent_decoder_spec(
        config,
        max_model_len,
        norm_eps=1e-5,
        embed_scale=config["scale_emb"],
        residual_scale=config.get("scale_depth", num_layers**0.5) / num_layers**0.5,
        logit_scale=config["dim_model_base"] / config["hidden_size"],
    )


def _names(config: Config) -> Names:
    return Names(interleaved_rope=config.get("rope_interleave", True))


FAMILIES = (
    Family(
        architectures=("DeepseekV2ForCausalLM",),
        spec_from_config=_deepseek_v2_spec,
        names=Names(interleaved_rope=True),
    ),
    Family(
        architectures=("DeepseekV3ForCausalLM",),
        spec_from_config=_deepseek_v3_spec,
        names=_names,
        further_layers=True,
    ),
    Family(
        architectures=("DeepseekV32ForCausalLM", "GlmMoeDsaForCausalLM"),
        spec_from_config=_indexed_spec,
        names=Names(interleaved_rope=True),
        other_tensors=(r".*\.self_attn\.indexer\..*",),
        further_layers=True,
    ),
    Family(
        architectures=("Glm4MoeLiteForCausalLM",),
        spec_from_config=_glm4_moe_lite_spec,
        names=_names,
        further_layers=True,
    ),
    Family(architectures=("YoutuForCausalLM",), spec_from_config=_youtu_spec, names=_names),
    Family(architectures=("MiniCPM3ForCausalLM",), spec_from_config=_minicpm3_spec),
)
