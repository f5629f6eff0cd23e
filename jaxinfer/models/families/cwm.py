"""Meta's Code World Model: Llama 3 with a window in three of four layers."""

from __future__ import annotations

from jaxinfer.models.family import Config, Family, llama_like_spec, renamed, sliding_windows
from jaxinfer.models.spec import DecoderSpec

_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 1_000_000.0,
    "factor": 16.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 8192,
}


def spec_from_config(config: Config, max_model_len: int | None) -> DecoderSpec:
    config = renamed(
        config, {}, rope_theta=1_000_000.0, head_dim=128, sliding_window=8192, rms_norm_eps=1e-5
    )
    if "rope_scaling" not in config:
        config.setdefault("rope_parameters", _ROPE)
    windows = sliding_windows(
        config,
        [config["sliding_window"] if i % 4 else None for i in range(config["num_hidden_layers"])],
    )
    return llama_like_spec(
        config, max_model_len, mlp_bias=config.get("mlp_bias", False), windows=windows
    )


FAMILIES = (Family(architectures=("CwmForCausalLM",), spec_from_config=spec_from_config),)
