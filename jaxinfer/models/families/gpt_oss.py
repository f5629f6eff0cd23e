"""OpenAI's gpt-oss: sinks, a window in every other layer, and experts with biases and a clamped activation."""

from __future__ import annotations

from jaxinfer.models.checkpoint_layout import Names
from jaxinfer.models.family import Config, Family, llama_like_spec, renamed, sliding_windows
from jaxinfer.models.moe_family import moe_spec, with_experts
from jaxinfer.models.moe_layout import MoeNames
from jaxinfer.models.moe_spec import ClampedSwiglu
from jaxinfer.models.spec import DecoderSpec


def _spec(config: Config, max_model_len: int | None) -> DecoderSpec:
    config = renamed(config, {}, rope_theta=150_000.0, sliding_window=128, num_local_experts=128)
    num_layers, bias = config["num_hidden_layers"], config.get("attention_bias", True)
    windows = sliding_windows(
        config, [None if i % 2 else config["sliding_window"] for i in range(num_layers)]
    )
    spec = llama_like_spec(
        config,
        max_model_len,
        norm_eps=1e-5,
        windows=windows,
        attention={"sinks": True, "qkv_bias": bias, "o_bias": bias},
    )
    moe = moe_spec(
        config,
        config["intermediate_size"],
        activation=ClampedSwiglu(
            config.get("swiglu_alpha", 1.702), config.get("swiglu_limit", 7.0)
        ),
        bias=True,
        routing={"renormalize": True, "bias": True},
    )
    return with_experts(spec, moe)


FAMILIES = (
    Family(
        architectures=("GptOssForCausalLM",),
        spec_from_config=_spec,
        names=Names(
            moe=MoeNames(
                router="mlp.router.weight",
                router_bias="mlp.router.bias",
                expert=None,
                layout="interleaved",
            )
        ),
    ),
)
