"""Rotary frequencies against transformers', from both forms of its configs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from transformers import Gemma3TextConfig, LlamaConfig, Phi3Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from jaxinfer.models.registry import describe_model
from jaxinfer.models.rope_config import rope_parameters, rope_spec, scaled_max_positions

POSITIONS = 8192
SCALINGS: list[dict[str, Any]] = [
    {"rope_type": "linear", "factor": 4.0},
    {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 2048,
    },
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048},
    {"rope_type": "yarn", "factor": 4.0, "beta_fast": 16, "beta_slow": 2, "attention_factor": 0.7},
    {"rope_type": "yarn", "factor": 8.0, "mscale": 0.7, "mscale_all_dim": 1.3, "truncate": False},
]


def resolve(config: dict[str, Any], head_dim: int, max_model_len: int = POSITIONS):
    parameters = rope_parameters(config)
    return rope_spec(parameters, head_dim, config["max_position_embeddings"], max_model_len)


@pytest.mark.parametrize("form", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("scaling", SCALINGS, ids=lambda s: s["rope_type"])
def test_scaled_frequencies(scaling: dict[str, Any], form: str) -> None:
    base = {"max_position_embeddings": POSITIONS, "head_dim": 64, "num_attention_heads": 4}
    theta = {"rope_theta": 500000.0}
    oracle = LlamaConfig(**base, rope_parameters={**scaling, **theta})
    expected, factor = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](oracle)
    if form == "rope_scaling":  # the older form says "type" and has theta beside it
        old = {**scaling, "type": scaling["rope_type"]}
        del old["rope_type"]
        config = {**base, **theta, "rope_scaling": old}
    else:
        config = {**base, "rope_parameters": {**scaling, **theta}}
    rope = resolve(config, head_dim=64)
    np.testing.assert_allclose(rope.inverse_frequencies, expected.numpy(), rtol=1e-6)
    assert rope.attention_factor == pytest.approx(factor)


@pytest.mark.parametrize("name", ["longrope", "su"])
@pytest.mark.parametrize("max_model_len", [64, 65])
def test_longrope_chooses_once_by_the_longest_request(max_model_len: int, name: str) -> None:
    scaling = {"short_factor": [1.0, 1.1, 1.2, 1.4], "long_factor": [1.5, 2.0, 4.0, 8.0]}
    config = {
        "architectures": ["Phi3ForCausalLM"],
        "vocab_size": 32,
        "hidden_size": 32,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "max_position_embeddings": 512,
        "original_max_position_embeddings": 64,
        "partial_rotary_factor": 0.5,
        "rope_scaling": {"type": name, **scaling},
    }
    oracle = Phi3Config(
        hidden_size=32,
        num_attention_heads=2,
        max_position_embeddings=512,
        original_max_position_embeddings=64,
        rope_parameters={"rope_type": "longrope", "partial_rotary_factor": 0.5, **scaling},
    )
    expected, factor = ROPE_INIT_FUNCTIONS["longrope"](oracle, seq_len=max_model_len)
    rope = describe_model(config, max_model_len).spec.layers[0].attention.rope
    np.testing.assert_allclose(rope.inverse_frequencies, expected.numpy(), rtol=1e-6)
    assert rope.attention_factor == pytest.approx(factor)


def test_gemma3_scales_full_layers_only() -> None:
    config = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "text_config": {
            "hidden_size": 64,
            "intermediate_size": 32,
            "num_hidden_layers": 6,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
            "sliding_window": 1024,
        },
    }
    oracle = Gemma3TextConfig(**config["text_config"])
    layers = [layer.attention for layer in describe_model(config).spec.layers]
    assert [layer.sliding_window for layer in layers] == [1024] * 5 + [None]
    dims = np.arange(0, oracle.head_dim, 2) / oracle.head_dim
    np.testing.assert_allclose(layers[0].rope.inverse_frequencies, 1e4**-dims)
    np.testing.assert_allclose(layers[5].rope.inverse_frequencies, 1e6**-dims / 8)


@pytest.mark.parametrize(
    ("scaling", "positions"),
    [
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8192}, 32768),
        ({"rope_type": "linear", "factor": 2.0}, 16384),
        ({"rope_type": "llama3", "factor": 8.0}, 8192),
        ({"rope_type": "default"}, 8192),
    ],
)
def test_longest_sequence(scaling: dict[str, Any], positions: int) -> None:
    parameters = rope_parameters(
        {"max_position_embeddings": POSITIONS, "rope_parameters": scaling, "rope_theta": 1e4}
    )
    assert scaled_max_positions(parameters, POSITIONS) == positions


@pytest.mark.parametrize(
    ("scaling", "message"),
    [
        ({"rope_type": "dynamic", "factor": 2.0}, "'dynamic' is not supported; supported"),
        ({"rope_type": "linear"}, "'linear' must hold 'factor'"),
        ({"rope_type": "llama3", "factor": 8.0}, "must hold 'low_freq_factor'"),
        (
            {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [2.0]},
            "long_factor must have 32 entries, got 1",
        ),
        ({"full_attention": {"rope_type": "default"}}, "per layer type"),
    ],
)
def test_what_cannot_be_computed_is_refused(scaling: dict[str, Any], message: str) -> None:
    config = {
        "max_position_embeddings": POSITIONS,
        "original_max_position_embeddings": 2048,
        "rope_scaling": scaling,
    }
    with pytest.raises(ValueError, match=message):
        resolve(config, head_dim=64)
