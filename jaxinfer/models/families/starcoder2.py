"""StarCoder 2: grouped queries, layer norms and biases, a window for all layers or none."""

from __future__ import annotations

from jaxinfer.models.checkpoint_layout import Names
from jaxinfer.models.family import Config, Family, llama_like_spec, plain_mlp, renamed
from jaxinfer.models.spec import DecoderSpec, NormSpec


def spec_from_config(config: Config, max_model_len: int | None) -> DecoderSpec:
    config = renamed(
        config,
        {},
        hidden_act="gelu_pytorch_tanh",
        norm_epsilon=1e-5,
        tie_word_embeddings=True,
        num_key_value_heads=2,
    )
    bias = config.get("use_bias", True)
    return llama_like_spec(
        config,
        max_model_len,
        attention={"qkv_bias": bias, "o_bias": bias},
        mlp=plain_mlp(config, bias),
        norm=NormSpec("layer", config["norm_epsilon"], has_bias=True),
        windows=[config.get("sliding_window")] * config["num_hidden_layers"],
    )


FAMILIES = (
    Family(
        architectures=("Starcoder2ForCausalLM",),
        spec_from_config=spec_from_config,
        names=Names(up="mlp.c_fc", down="mlp.c_proj"),
    ),
)
