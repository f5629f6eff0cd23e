"""SmolLM3: every fourth layer without positions."""

from __future__ import annotations

from jaxinfer.models.family import (
    Config,
    Family,
    config_rope,
    llama_like_spec,
    renamed,
    sliding_windows,
)
from jaxinfer.models.spec import DecoderSpec


def spec_from_config(config: Config, max_model_len: int | None) -> DecoderSpec:
    config = renamed(
        config, {}, rope_theta=2_000_000.0, num_key_value_heads=4, tie_word_embeddings=True
    )
    num_layers, every = config["num_hidden_layers"], config.get("no_rope_layer_interval", 4)
    # The field holds 1 for the layers that do rotate.
    rotated = config.get("no_rope_layers") or [int((i + 1) % every != 0) for i in range(num_layers)]
    if len(rotated) != num_layers:
        raise ValueError(
            f"no_rope_layers must have num_hidden_layers ({num_layers}) entries, got {len(rotated)}."
        )
    window = config.get("sliding_window") if config.get("use_sliding_window", False) else None
    rope, longest = config_rope(config, max_model_len)
    bias = config.get("attention_bias", False)
    return llama_like_spec(
        config,
        max_model_len,
        attention={"qkv_bias": bias, "o_bias": bias},
        mlp_bias=config.get("mlp_bias", False),
        windows=sliding_windows(config, [None if r else window for r in rotated]),
        ropes=[rope if r else None for r in rotated],
        max_position_embeddings=longest,
    )


FAMILIES = (Family(architectures=("SmolLM3ForCausalLM",), spec_from_config=spec_from_config),)
