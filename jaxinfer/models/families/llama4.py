"""Llama 4 (text): weights multiply what experts get, every fourth layer knows no positions, and the others attend within
chunks. Contexts longer than a chunk are refused."""

from __future__ import annotations

from dataclasses import replace

from jaxinfer.models.checkpoint_layout import Names
from jaxinfer.models.family import Config, Family, config_rope, llama_like_spec, renamed
from jaxinfer.models.moe_family import moe_spec, with_experts
from jaxinfer.models.moe_layout import MoeNames
from jaxinfer.models.spec import DecoderSpec, NormSpec, QKNormSpec, QueryTemperature


def _spec(config: Config, max_model_len: int | None) -> DecoderSpec:
    chunk = config.get("attention_chunk_size", 8192)
    config = renamed(
        config, {}, rope_theta=500_000.0, intermediate_size_mlp=16_384, num_local_experts=16,
        num_experts_per_tok=1,
    )  # fmt: skip
    longest = max_model_len or config["max_position_embeddings"]
    if chunk is not None and longest > chunk:
        raise ValueError(
            f"max_model_len must be at most attention_chunk_size ({chunk}) for this model, got {longest}."
        )
    num_layers, bias = config["num_hidden_layers"], config.get("attention_bias", False)
    every = config.get("no_rope_layer_interval", 4)
    rotated = config.get("no_rope_layers") or [(i + 1) % every != 0 for i in range(num_layers)]
    rope, _ = config_rope(config, max_model_len)
    eps = config.get("rms_norm_eps", 1e-5)
    spec = llama_like_spec(
        {**config, "intermediate_size": config["intermediate_size_mlp"]},
        max_model_len,
        norm_eps=eps,
        ropes=[rope if is_rotated else None for is_rotated in rotated],
        attention={"qkv_bias": bias, "o_bias": bias},
    )
    norm = QKNormSpec(NormSpec("rms", eps, has_weight=False), after_rope=True)
    temperature = QueryTemperature(
        config.get("attn_scale", 0.1), config.get("floor_scale", 8192), offset=1
    )
    changes = {
        True: {"qk_norm": norm if config.get("use_qk_norm", True) else None},
        False: {
            "temperature": temperature if config.get("attn_temperature_tuning", True) else None
        },
    }
    layers = tuple(
        replace(layer, attention=replace(layer.attention, **changes[bool(is_rotated)]))
        for layer, is_rotated in zip(spec.layers, rotated, strict=True)
    )
    moe = moe_spec(
        config,
        config["intermediate_size"],
        shared_dim=config["intermediate_size"],
        routing={"scores": "sigmoid"},
        scale_inputs=True,
    )
    step = config.get("interleave_moe_layer_step", 1)
    sparse = config.get("moe_layers")
    if sparse is None:
        sparse = range(step - 1, num_layers, step)
    return with_experts(replace(spec, layers=layers), moe, [i in sparse for i in range(num_layers)])


FAMILIES = (
    Family(
        architectures=("Llama4ForCausalLM",),
        spec_from_config=_spec,
        names=Names(
            interleaved_rope=True,
            gate_up=("feed_forward.gate_proj", "feed_forward.up_proj"),
            down="feed_forward.down_proj",
            moe=MoeNames(
                router="feed_forward.router.weight",
                expert=None,
                all_gate_up=("feed_forward.experts.gate_up_proj",),
                all_down="feed_forward.experts.down_proj",
                layout="in_out",
                shared_gate_up=(
                    "feed_forward.shared_expert.gate_proj.weight",
                    "feed_forward.shared_expert.up_proj.weight",
                ),
                shared_down="feed_forward.shared_expert.down_proj.weight",
            ),
        ),
    ),
)
