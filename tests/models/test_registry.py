"""What configs are understood, and how those that aren't are refused."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from jaxinfer.models.registry import describe_model

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
}


def with_architecture(architecture: str, **changes: Any) -> dict[str, Any]:
    return {**LLAMA, "architectures": [architecture], **changes}


def test_a_config_of_the_first_llama_has_no_kv_heads_and_no_head_dim() -> None:
    spec = describe_model(LLAMA).spec
    attention = spec.layers[0].attention
    assert (attention.num_kv_heads, attention.head_dim, spec.tied_head) == (4, 16, False)
    assert attention.query_scale == 0.25


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_checkpoint_dtype(key: str) -> None:
    assert describe_model({**LLAMA, key: "bfloat16"}).checkpoint_dtype == "bfloat16"
    assert describe_model(LLAMA).checkpoint_dtype == "float32"


def test_unknown_architecture_names_itself_and_the_supported_ones() -> None:
    with pytest.raises(ValueError, match=r"RwkvForCausalLM is not supported; .*LlamaForCausalLM"):
        describe_model(with_architecture("RwkvForCausalLM"))
    with pytest.raises(ValueError, match="model_type 'bert'"):
        describe_model({"model_type": "bert"})


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({**LLAMA, "hidden_act": "relu6"}, "hidden_act 'relu6' is not supported; supported"),
        ({**LLAMA, "num_key_value_heads": 3}, r"num_heads \(4\) must be a multiple .*\(3\)"),
        (
            with_architecture("Qwen3ForCausalLM", layer_types=["chunked"], use_sliding_window=True),
            "layer_types .*chunked.* not supported",
        ),
        (
            with_architecture(
                "Qwen3ForCausalLM", layer_types=["full_attention"], use_sliding_window=True
            ),
            r"layer_types must have num_hidden_layers \(4\) entries, got 1",
        ),
        (
            with_architecture("Gemma3ForCausalLM", attn_logit_softcapping=30.0),
            r"attn_logit_softcapping \(30.0\) is not supported",
        ),
        (with_architecture("MistralForCausalLM", sliding_window=0), "sliding_window must be"),
        (
            with_architecture("BloomForCausalLM", apply_residual_connection_post_layernorm=True),
            "apply_residual_connection_post_layernorm True is not supported; supported: False",
        ),
        (
            with_architecture("OPTForCausalLM", word_embed_proj_dim=32),
            "word_embed_proj_dim 32 is not supported; supported: 64",
        ),
        (
            with_architecture("MptForCausalLM", attn_config={"qk_ln": True}),
            "qk_ln True is not supported",
        ),
        (
            with_architecture("GPTNeoForCausalLM", attention_types=[[["banded"], 4]]),
            r"attention_types \['banded'\] are not supported; supported: \['global', 'local'\]",
        ),
        (
            with_architecture("GPT2LMHeadModel", activation_function="mish"),
            "hidden_act 'mish' is not supported; supported",
        ),
        (
            with_architecture("SmolLM3ForCausalLM", no_rope_layers=[1, 0]),
            r"no_rope_layers must have num_hidden_layers \(4\) entries, got 2",
        ),
        (
            with_architecture("Olmo2ForCausalLM", rope_scaling={"rope_type": "spiral"}),
            "rope_type 'spiral' is not supported; supported",
        ),
    ],
)
def test_what_the_decoder_cannot_do_is_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        describe_model(config)


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        ({"use_sliding_window": False, "sliding_window": 8}, [None] * 4),
        (
            {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2},
            [None, None, 8, 8],
        ),
        (
            {
                "use_sliding_window": True,
                "sliding_window": 8,
                "layer_types": ["sliding_attention", "full_attention"] * 2,
            },
            [8, None, 8, None],
        ),
    ],
)
def test_qwen_windows(changes: dict[str, Any], windows: list[int | None]) -> None:
    spec = describe_model(with_architecture("Qwen2ForCausalLM", **changes)).spec
    assert [layer.attention.sliding_window for layer in spec.layers] == windows


def test_reading_a_config_needs_no_jax() -> None:
    code = (
        "import sys; from jaxinfer.models.registry import describe_model; "
        f"describe_model({LLAMA!r}); sys.exit('jax' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_equal_configs_give_equal_hashable_specs() -> None:
    specs = {describe_model(LLAMA).spec, describe_model(dict(LLAMA)).spec}
    assert len(specs) == 1
