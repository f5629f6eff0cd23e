"""RecurrentGemma: linear recurrences with attention in a window between them, an MLP after each."""

from __future__ import annotations

import numpy as np

from jaxinfer.models.checkpoint_layout import Names
from jaxinfer.models.family import Config, Family, activation, llama_like_spec, with_states
from jaxinfer.models.spec import DecoderSpec, GatedMlpSpec, NormSpec
from jaxinfer.models.state_spec import RgLruSpec


def spec_from_config(config: Config, max_model_len: int | None) -> DecoderSpec:
    num_layers, heads = config["num_hidden_layers"], config["num_attention_heads"]
    blocks = config.get("block_types") or ("recurrent", "recurrent", "attention")
    unknown = set(blocks) - {"recurrent", "attention"}
    if unknown:
        raise ValueError(
            f'block_types {sorted(unknown)} are not supported; supported: "recurrent", "attention".'
        )
    act = activation(config, "hidden_activation", "gelu_pytorch_tanh")
    width = config.get("lru_width") or config["hidden_size"]
    spec = llama_like_spec(
        {"max_position_embeddings": 1 << 20, "partial_rotary_factor": 0.5, **config},
        max_model_len,
        attention={"qkv_bias": config.get("attention_bias", False), "o_bias": True},
        mlp=GatedMlpSpec(config["intermediate_size"] // 2, act, bias=True),
        norm=NormSpec("rms", config.get("rms_norm_eps", 1e-6), weight_offset=1.0),
        windows=[config.get("attention_window_size", 2048)] * num_layers,
        tied_head=config.get("tie_word_embeddings", True),
        embed_scale=_bfloat16(config["hidden_size"] ** 0.5),
        logit_soft_cap=config.get("logits_soft_cap", 30.0),
    )
    state = RgLruSpec(
        num_blocks=heads,
        block_dim=width // heads,
        conv_kernel=config.get("conv1d_width", 4),
        activation=act,
    )
    kinds = [blocks[i % len(blocks)] for i in range(num_layers)]
    return with_states(spec, [state if kind == "recurrent" else None for kind in kinds])


def _bfloat16(x: float) -> float:
    """The nearest number of seven fraction bits."""
    fraction, exponent = np.frexp(x)
    return float(np.ldexp(np.rint(np.ldexp(fraction, 8)), int(exponent) - 8))


FAMILIES = (
    Family(
        architectures=("RecurrentGemmaForCausalLM",),
        spec_from_config=spec_from_config,
        names=Names(
            norm="final_norm",
            attention_norm="temporal_pre_norm",
            mlp_norm="channel_pre_norm",
            qkv=("temporal_block.q_proj", "temporal_block.k_proj", "temporal_block.v_proj"),
            o="temporal_block.o_proj",
            gate_up=("mlp_block.gate_proj", "mlp_block.up_proj"),
            down="mlp_block.down_proj",
            state="temporal_block.",
        ),
    ),
)
