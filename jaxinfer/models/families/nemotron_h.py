"""Nemotron-H: layers that are a Mamba-2 state, attention without positions, or an MLP, each behind one norm."""

from __future__ import annotations

import math

from jaxinfer.models.checkpoint_layout import Names
from jaxinfer.models.family import Config, Family, activation
from jaxinfer.models.spec import AttentionSpec, DecoderSpec, LayerSpec, NormSpec, PlainMlpSpec
from jaxinfer.models.state_spec import Mamba2Spec

_KINDS = {
    **dict.fromkeys(("M", "mamba", "linear_attention"), "state"),
    **dict.fromkeys(("*", "attention", "full_attention"), "attention"),
    **dict.fromkeys(("-", "mlp"), "mlp"),
}
"""Letters of `hybrid_override_pattern`, older and newer names of `layers_block_type`."""


def spec_from_config(config: Config, max_model_len: int | None) -> DecoderSpec:
    pattern = (
        config.get("layers_block_type")
        or config.get("layer_types")
        or config.get("hybrid_override_pattern")
        or ()
    )
    unknown = set(pattern) - set(_KINDS)
    if unknown or not pattern:
        raise ValueError(
            f"layers_block_type or hybrid_override_pattern {sorted(unknown)} is not supported; supported: "
            f"{sorted(_KINDS)}."
        )
    for name in ("sliding_window", "attention_bias"):
        if config.get(name):
            raise ValueError(f"{name} ({config[name]}) is not supported for nemotron_h.")
    heads, dim = config["num_attention_heads"], config["head_dim"]
    bias = config.get("use_bias", False)
    layers = {
        "state": LayerSpec(
            None,
            None,
            state=Mamba2Spec(
                num_heads=config["mamba_num_heads"],
                head_dim=config["mamba_head_dim"],
                num_groups=config.get("n_groups", 8),
                state_dim=config.get("ssm_state_size", 128),
                conv_kernel=config.get("conv_kernel", 4),
                conv_bias=config.get("use_conv_bias", True),
                in_bias=bias,
                out_bias=bias,
                activation=activation(config, "mamba_hidden_act"),
                norm_eps=config.get("layer_norm_epsilon", 1e-5),
                step_limits=(config.get("time_step_min", 0.001), math.inf),
            ),
        ),
        "attention": LayerSpec(
            AttentionSpec(
                num_heads=heads,
                num_kv_heads=config.get("num_key_value_heads") or heads,
                head_dim=dim,
                query_scale=dim**-0.5,
                rope=None,
            ),
            None,
        ),
        "mlp": LayerSpec(
            None,
            PlainMlpSpec(
                config["intermediate_size"],
                activation(config, "mlp_hidden_act", "relu2"),
                config.get("mlp_bias", False),
            ),
        ),
    }
    return DecoderSpec(
        vocab_size=config["vocab_size"],
        max_position_embeddings=config["max_position_embeddings"],
        embed_dim=config["hidden_size"],
        layers=tuple(layers[_KINDS[kind]] for kind in pattern),
        norm=NormSpec("rms", config.get("layer_norm_epsilon", 1e-5)),
        tied_head=config.get("tie_word_embeddings", False),
    )


FAMILIES = (
    Family(
        architectures=("NemotronHForCausalLM",),
        spec_from_config=spec_from_config,
        names=Names(
            prefix="backbone.",
            embed="embeddings",
            norm="norm_f",
            attention_norm="norm",
            mlp_norm="norm",
            qkv=("mixer.q_proj", "mixer.k_proj", "mixer.v_proj"),
            o="mixer.o_proj",
            up="mixer.up_proj",
            down="mixer.down_proj",
            state="mixer.",
        ),
    ),
)
