"""Phi-3 and Phi-4: fused projections in the checkpoint, longrope, partial rotation."""

from __future__ import annotations

from jaxinfer.models.checkpoint_layout import Names
from jaxinfer.models.family import Config, Family, llama_like_spec
from jaxinfer.models.spec import DecoderSpec


def spec_from_config(config: Config, max_model_len: int | None) -> DecoderSpec:
    config = {"original_max_position_embeddings": 4096, **config}
    for key in ("rope_scaling", "rope_parameters"):
        parameters = config.get(key)
        if parameters and parameters.get("rope_type", parameters.get("type")) in ("su", "yarn"):
            config[key] = {**parameters, "rope_type": "longrope"}  # what early configs call it
    windows = [config.get("sliding_window")] * config["num_hidden_layers"]
    return llama_like_spec(config, max_model_len, windows=windows, norm_eps=1e-5)


FAMILIES = (
    Family(
        architectures=("Phi3ForCausalLM",),
        spec_from_config=spec_from_config,
        names=Names(qkv=("self_attn.qkv_proj",), gate_up=("mlp.gate_up_proj",)),
    ),
)
