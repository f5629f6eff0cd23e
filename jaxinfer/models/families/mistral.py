"""Mistral 7B and its successors: Llama with one sliding window for all layers, some, or none; and Ministral 3, whose queries
grow with their positions."""

from __future__ import annotations

from jaxinfer.models.family import Config, Family, llama_like_spec, renamed, sliding_windows
from jaxinfer.models.rope_config import rope_parameters
from jaxinfer.models.spec import DecoderSpec, QueryTemperature


def _mistral_spec(config: Config, max_model_len: int | None) -> DecoderSpec:
    windows = [config.get("sliding_window", 4096)] * config["num_hidden_layers"]
    return llama_like_spec(config, max_model_len, windows=windows)


def _ministral_spec(config: Config, max_model_len: int | None) -> DecoderSpec:
    every = [config.get("sliding_window", 4096)] * config["num_hidden_layers"]
    return llama_like_spec(config, max_model_len, windows=sliding_windows(config, every))


def _ministral3_spec(config: Config, max_model_len: int | None) -> DecoderSpec:
    config = renamed(config, {}, head_dim=128, rms_norm_eps=1e-5)
    parameters = rope_parameters(config)
    attention = {}
    if beta := parameters.get("llama_4_scaling_beta"):
        original = parameters["original_max_position_embeddings"]
        attention["temperature"] = QueryTemperature(beta, original)
    windows = [config.get("sliding_window")] * config["num_hidden_layers"]
    return llama_like_spec(config, max_model_len, attention=attention, windows=windows)


FAMILIES = (
    Family(architectures=("MistralForCausalLM",), spec_from_config=_mistral_spec),
    Family(architectures=("MinistralForCausalLM",), spec_from_config=_ministral_spec),
    Family(architectures=("Ministral3ForCausalLM",), spec_from_config=_ministral3_spec),
)
