"""Cohere's Command: attention and MLP side by side behind one norm without bias, neighbouring elements rotated, scaled
logits. Command R7B and A rotate in their layers with a window only."""

from __future__ import annotations

from typing import Any

from jaxinfer.models.checkpoint_layout import Names
from jaxinfer.models.family import (
    Config,
    Family,
    config_rope,
    llama_like_spec,
    renamed,
    sliding_windows,
)
from jaxinfer.models.spec import DecoderSpec, NormSpec, QKNormSpec


def _spec(config: Config, max_model_len: int | None, **features) -> DecoderSpec:
    bias = config.get("attention_bias", False)
    norm = NormSpec("layer", config["layer_norm_eps"])
    attention: dict[str, Any] = {"qkv_bias": bias, "o_bias": bias}
    if config.get("use_qk_norm", False):
        attention["qk_norm"] = QKNormSpec(norm, over="own_head")
    return llama_like_spec(
        config,
        max_model_len,
        attention=attention,
        norm=norm,
        norms="parallel_shared",
        logit_scale=config["logit_scale"],
        **features,
    )


_DEFAULTS: dict[str, Any] = {
    "layer_norm_eps": 1e-5,
    "logit_scale": 0.0625,
    "tie_word_embeddings": True,
}


def _cohere_spec(config: Config, max_model_len: int | None) -> DecoderSpec:
    return _spec(renamed(config, {}, rope_theta=500_000.0, **_DEFAULTS), max_model_len)


def _cohere2_spec(config: Config, max_model_len: int | None) -> DecoderSpec:
    config = renamed(config, {}, sliding_window=4096, sliding_window_pattern=4, **_DEFAULTS)
    pattern = config["sliding_window_pattern"]
    windows = sliding_windows(
        config,
        [
            config["sliding_window"] if (i + 1) % pattern else None
            for i in range(config["num_hidden_layers"])
        ],
    )
    rope, _ = config_rope(config, max_model_len)
    return _spec(
        config,
        max_model_len,
        windows=windows,
        ropes=[None if window is None else rope for window in windows],
    )


def _compass_spec(config: Config, max_model_len: int | None) -> DecoderSpec:
    """`rope_parameters` by layer type, None for layers that are not rotated. Text is at one place in all three dimensions
    of the multimodal rotation, so that its sections don't matter."""
    config = renamed(config, {}, sliding_window=4096, **{**_DEFAULTS, "logit_scale": 1.0})
    windows = sliding_windows(config, [None] * config["num_hidden_layers"])
    by_type = config.get("rope_parameters", {})
    kinds = ["full_attention" if window is None else "sliding_attention" for window in windows]
    ropes = {
        kind: None
        if by_type.get(kind) is None
        else config_rope({**config, "rope_parameters": by_type[kind]}, max_model_len)[0]
        for kind in set(kinds)
    }
    return _spec(config, max_model_len, windows=windows, ropes=[ropes[kind] for kind in kinds])


_NAMES = Names(interleaved_rope=True)

FAMILIES = (
    Family(architectures=("CohereForCausalLM",), spec_from_config=_cohere_spec, names=_NAMES),
    Family(architectures=("Cohere2ForCausalLM",), spec_from_config=_cohere2_spec, names=_NAMES),
    Family(architectures=("CohereCompassForCausalLM",), spec_from_config=_compass_spec),
)
