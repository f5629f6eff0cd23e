"""LG's EXAONE. The third is Llama under names of its own; the fourth has norms behind attention and MLP, and of each query and key head; rotated in layers with a window only,
where there are any."""

from __future__ import annotations

from jaxinfer.models.checkpoint_layout import Names
from jaxinfer.models.family import (
    Config,
    Family,
    config_rope,
    llama_like_spec,
    renamed,
    rms_head_norm,
    sliding_windows,
)
from jaxinfer.models.spec import DecoderSpec

_FIELDS = {
    "num_layers": "num_hidden_layers",
    "layer_norm_epsilon": "rms_norm_eps",
    "activation_function": "hidden_act",
}


def _exaone3_spec(config: Config, max_model_len: int | None) -> DecoderSpec:
    config = renamed(config, _FIELDS, rope_theta=500_000.0, rms_norm_eps=1e-5)
    bias = config.get("attention_bias", False)
    return llama_like_spec(
        config,
        max_model_len,
        attention={"qkv_bias": bias, "o_bias": bias},
        mlp_bias=config.get("mlp_bias", False),
    )


def _exaone4_spec(config: Config, max_model_len: int | None) -> DecoderSpec:
    has_window = config.get("sliding_window", 4096) is not None
    config = renamed(config, {}, sliding_window=4096, sliding_window_pattern=4, rms_norm_eps=1e-5)
    num_layers = config["num_hidden_layers"]
    windows, ropes = [None] * num_layers, None
    if has_window:
        pattern = config["sliding_window_pattern"]
        windows = sliding_windows(
            config,
            [config["sliding_window"] if (i + 1) % pattern else None for i in range(num_layers)],
        )
        rope, _ = config_rope(config, max_model_len)
        ropes = [None if window is None else rope for window in windows]
    return llama_like_spec(
        config,
        max_model_len,
        attention={"qk_norm": rms_head_norm(config["rms_norm_eps"])},
        norms="post",
        windows=windows,
        ropes=ropes,
    )


FAMILIES = (
    Family(
        architectures=("ExaoneForCausalLM",),
        model_types=("exaone",),
        spec_from_config=_exaone3_spec,
        names=Names(
            prefix="transformer.",
            embed="wte",
            norm="ln_f",
            layer="h.{}.",
            qkv=tuple(f"attn.attention.{x}_proj" for x in "qkv"),
            o="attn.attention.out_proj",
            gate_up=("mlp.c_fc_0", "mlp.c_fc_1"),
            down="mlp.c_proj",
            attention_norm="ln_1",
            mlp_norm="ln_2",
        ),
    ),
    Family(architectures=("Exaone4ForCausalLM",), spec_from_config=_exaone4_spec),
)
