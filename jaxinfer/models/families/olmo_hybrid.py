"""OLMo Hybrid: gated delta nets behind norms, with OLMo 2's attention between them, whose norms come after it."""

from __future__ import annotations

from dataclasses import replace

from jaxinfer.models.checkpoint_layout import Names, decoder_plan
from jaxinfer.models.family import Config, Family, activation, layer_kinds, llama_like_spec
from jaxinfer.models.sharded_dims import ShardedDims
from jaxinfer.models.spec import DecoderSpec, NormSpec, QKNormSpec
from jaxinfer.models.state_layout import DeltaNetNames
from jaxinfer.models.state_spec import DeltaNetSpec
from jaxinfer.weights.plan import LoadPlan

_DELTA_NORM_EPS = 1e-5
"""Which no config says."""


def spec_from_config(config: Config, max_model_len: int | None) -> DecoderSpec:
    num_layers, heads = config["num_hidden_layers"], config["num_attention_heads"]
    every = ["full_attention" if i % 4 == 3 else "linear_attention" for i in range(num_layers)]
    kinds = layer_kinds(config, every)
    bias, eps = config.get("attention_bias", False), config.get("rms_norm_eps", 1e-6)
    parameters = config.get("rope_parameters") or config.get("rope_scaling") or {}
    rotates = (parameters.get("rope_theta") or config.get("rope_theta")) is not None
    spec = llama_like_spec(
        config,
        max_model_len,
        attention={
            "qkv_bias": bias,
            "o_bias": bias,
            "qk_norm": QKNormSpec(NormSpec("rms", eps), over="projection"),
        },
        norms="post",
        ropes=None if rotates else [None] * num_layers,
    )
    key_heads = config.get("linear_num_key_heads") or heads
    key_dim = config.get("linear_key_head_dim") or int(0.75 * config["hidden_size"] / key_heads)
    state = DeltaNetSpec(
        num_key_heads=key_heads,
        num_value_heads=config.get("linear_num_value_heads") or heads,
        key_dim=key_dim,
        value_dim=config.get("linear_value_head_dim") or 2 * key_dim,
        conv_kernel=config.get("linear_conv_kernel_dim", 4),
        activation=activation(config),
        norm_eps=_DELTA_NORM_EPS,
        max_beta=2.0 if config.get("linear_allow_neg_eigval", True) else 1.0,
    )
    layers = zip(spec.layers, kinds, strict=True)
    return replace(
        spec,
        layers=tuple(
            replace(layer, attention=None, state=state, norms="pre")
            if kind == "linear_attention"
            else layer
            for layer, kind in layers
        ),
    )


_NAMES = Names(
    attention_norm="attention_layer_norm",
    mlp_norm="feedforward_layer_norm",
    state="linear_attn.",
    delta_net=DeltaNetNames(
        in_proj=(
            ("q_proj", "q"),
            ("k_proj", "k"),
            ("v_proj", "v"),
            ("g_proj", "z"),
            ("b_proj", "b"),
            ("a_proj", "a"),
        ),
        conv=("q_conv1d", "k_conv1d", "v_conv1d"),
        norm="o_norm",
        out_proj="o_proj",
    ),
)


def checkpoint_plan(config: Config, spec: DecoderSpec, dims: ShardedDims) -> LoadPlan:
    """transformers has one name for norms of both kinds of layers, and saves them under one name of the original's."""

    def saved(name: str) -> str:
        return name.replace("post_attention_layernorm", "feedforward_layer_norm")

    return {
        path: source.or_else(source.renamed(saved)) if path[-1] == "attention_post_norm" else source
        for path, source in decoder_plan(spec, dims, _NAMES).items()
    }


FAMILIES = (
    Family(
        architectures=("OlmoHybridForCausalLM",),
        spec_from_config=spec_from_config,
        checkpoint_plan=checkpoint_plan,
    ),
)
