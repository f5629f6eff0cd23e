"""Falcon-H1: attention and a Mamba-2 state side by side in every layer, and a factor on nearly everything."""

from __future__ import annotations

from dataclasses import replace

from jaxinfer.models.checkpoint_layout import Names
from jaxinfer.models.families.bamba import mamba2_state
from jaxinfer.models.family import Config, Family, activation, head_dim, llama_like_spec
from jaxinfer.models.spec import DecoderSpec, GatedMlpSpec


def spec_from_config(config: Config, max_model_len: int | None) -> DecoderSpec:
    bias, into = config.get("attention_bias", False), config.get("attention_in_multiplier", 1.0)
    if bias and into != 1:
        raise ValueError(
            f"attention_in_multiplier ({into}) is not supported together with attention_bias."
        )
    gate_scale, down_scale = config.get("mlp_multipliers") or (1.0, 1.0)
    spec = llama_like_spec(
        config,
        max_model_len,
        attention={
            "qkv_bias": bias,
            "o_bias": bias,
            # Scores are products of a query and a key, each of an input that is scaled.
            "query_scale": head_dim(config) ** -0.5 * config.get("key_multiplier", 1.0) * into**2,
            "out_scale": config.get("attention_out_multiplier", 1.0) * into,
        },
        mlp=GatedMlpSpec(
            config["intermediate_size"],
            activation(config),
            config.get("mlp_bias", False),
            gate_scale=gate_scale,
            out_scale=down_scale,
        ),
        embed_scale=config.get("embedding_multiplier", 1.0),
        logit_scale=config.get("lm_head_multiplier", 1.0),
    )
    inner = config.get("mamba_d_ssm") or config.get("mamba_expand", 2) * config["hidden_size"]
    norm = "none"
    if config.get("mamba_rms_norm", False):
        norm = "before_gate" if config.get("mamba_norm_before_gate", True) else "after_gate"
    scales = config.get("ssm_multipliers")
    state = mamba2_state(
        config,
        head_dim=inner // config["mamba_n_heads"],
        out_bias=config.get("projectors_bias", False),
        norm=norm,
        input_scale=config.get("ssm_in_multiplier", 1.0),
        part_scales=None if scales is None else tuple(scales),
        out_scale=config.get("ssm_out_multiplier", 1.0),
    )
    return replace(spec, layers=tuple(replace(layer, state=state) for layer in spec.layers))


FAMILIES = (
    Family(
        architectures=("FalconH1ForCausalLM",),
        spec_from_config=spec_from_config,
        names=Names(
            norm="final_layernorm",
            mlp_norm="pre_ff_layernorm",
            gate_up=("feed_forward.gate_proj", "feed_forward.up_proj"),
            down="feed_forward.down_proj",
        ),
    ),
)
