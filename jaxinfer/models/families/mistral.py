"""Mistral 7B and its successors: Llama with one sliding window for all layers, or none."""

from __future__ import annotations

from jaxinfer.models.checkpoint_layout import decoder_plan
from jaxinfer.models.family import Config, Family, llama_like_spec
from jaxinfer.models.spec import DecoderSpec


def spec_from_config(config: Config, max_model_len: int | None) -> DecoderSpec:
    windows = [config.get("sliding_window", 4096)] * config["num_hidden_layers"]
    return llama_like_spec(config, max_model_len, windows=windows)


FAMILY = Family(
    architectures=("MistralForCausalLM",),
    spec_from_config=spec_from_config,
    checkpoint_plan=lambda config, spec, dims: decoder_plan(spec, dims),
)
