"""LFM2: short convolutions with attention between them, an MLP or a mixture after each."""

from __future__ import annotations

from jaxinfer.models.checkpoint_layout import Names
from jaxinfer.models.family import (
    Config,
    Family,
    layer_kinds,
    llama_like_spec,
    rms_head_norm,
    with_states,
)
from jaxinfer.models.moe_family import moe_spec, with_experts
from jaxinfer.models.moe_layout import MoeNames
from jaxinfer.models.spec import DecoderSpec, GatedMlpSpec, NormSpec
from jaxinfer.models.state_spec import ShortConvSpec


def _lfm2_spec(config: Config, max_model_len: int | None) -> DecoderSpec:
    return _spec(config, max_model_len, _mlp_dim(config))


def _lfm2_moe_spec(config: Config, max_model_len: int | None) -> DecoderSpec:
    spec = _spec(config, max_model_len, config["intermediate_size"])
    bias = "scores" if config.get("use_expert_bias", True) else None
    moe = moe_spec(
        config,
        config["moe_intermediate_size"],
        routing={
            "scores": "sigmoid",
            "correction_bias": bias,
            "renormalize": config.get("norm_topk_prob", True),
            "scale": config.get("routed_scaling_factor", 1.0),
        },
    )
    num_dense = config.get("num_dense_layers", 2)
    return with_experts(spec, moe, [i >= num_dense for i in range(len(spec.layers))])


def _spec(config: Config, max_model_len: int | None, mlp_dim: int) -> DecoderSpec:
    num_layers, eps = config["num_hidden_layers"], config.get("norm_eps", 1e-5)
    attending = config.get("full_attn_idxs")
    kinds = layer_kinds(
        config,
        [
            "full_attention" if attending is None or i in attending else "conv"
            for i in range(num_layers)
        ],
        ("full_attention", "conv"),
    )
    spec = llama_like_spec(
        {"rope_theta": 1e6, **config},
        max_model_len,
        attention={"qk_norm": rms_head_norm(eps)},
        mlp=GatedMlpSpec(mlp_dim),
        norm=NormSpec("rms", eps),
        tied_head=config.get("tie_embedding", config.get("tie_word_embeddings", True)),
    )
    state = ShortConvSpec(
        conv_kernel=config.get("conv_L_cache", 3), bias=config.get("conv_bias", False)
    )
    return with_states(spec, [state if kind == "conv" else None for kind in kinds])


def _mlp_dim(config: Config) -> int:
    """Two thirds of the config's number, rounded up, unless it says that it is the size itself."""
    dim = config.get("block_ff_dim") or config["intermediate_size"]
    if not config.get("block_auto_adjust_ff_dim", True):
        return dim
    dim, factor = int(2 * dim / 3), config.get("block_ffn_dim_multiplier", 1.0)
    if factor is None:
        return dim
    multiple = config.get("block_multiple_of", 256)
    return multiple * -(-int(factor * dim) // multiple)


_NAMES = Names(
    norm="embedding_norm",
    attention_norm="operator_norm",
    mlp_norm="ffn_norm",
    o="self_attn.out_proj",
    q_norm="self_attn.q_layernorm",
    k_norm="self_attn.k_layernorm",
    gate_up=("feed_forward.w1", "feed_forward.w3"),
    down="feed_forward.w2",
    state="conv.",
    moe=MoeNames(
        router="feed_forward.gate.weight",
        correction_bias="feed_forward.expert_bias",
        expert="feed_forward.experts.{}.",
        gate_up=("w1.weight", "w3.weight"),
        down="w2.weight",
        all_gate_up=("feed_forward.experts.gate_up_proj",),
        all_down="feed_forward.experts.down_proj",
    ),
)

FAMILIES = (
    Family(("Lfm2ForCausalLM",), _lfm2_spec, _NAMES),
    Family(("Lfm2MoeForCausalLM",), _lfm2_moe_spec, _NAMES),
)
