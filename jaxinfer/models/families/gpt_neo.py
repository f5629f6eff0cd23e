"""EleutherAI's GPT-Neo: GPT-2 with unscaled attention scores, and a window in every second layer."""

from __future__ import annotations

from jaxinfer.models.checkpoint_layout import Names
from jaxinfer.models.family import Config, Family, llama_like_spec, plain_mlp, renamed
from jaxinfer.models.spec import DecoderSpec, LearnedPositions, NormSpec

_FIELDS = {
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "activation_function": "hidden_act",
}
_DEFAULT_TYPES = [[["global", "local"], 12]]


def _windows(config: Config) -> list[int | None]:
    """By layer, from `attention_types`: pairs of a list of kinds and how often it is repeated."""
    types = config.get("attention_types") or _DEFAULT_TYPES
    kinds = [kind for kinds, count in types for _ in range(count) for kind in kinds]
    if len(kinds) != config["num_hidden_layers"]:
        raise ValueError(
            f"attention_types must describe num_layers ({config['num_hidden_layers']}) layers, "
            f"got {len(kinds)}."
        )
    windows = {"global": None, "local": config.get("window_size", 256)}
    if unknown := set(kinds) - windows.keys():
        raise ValueError(
            f"attention_types {sorted(unknown)} are not supported; supported: {sorted(windows)}."
        )
    return [windows[kind] for kind in kinds]


def spec_from_config(config: Config, max_model_len: int | None) -> DecoderSpec:
    config = renamed(
        config,
        _FIELDS,
        hidden_act="gelu_new",
        layer_norm_epsilon=1e-5,
        tie_word_embeddings=True,
    )
    return llama_like_spec(
        config,
        max_model_len,
        attention={"query_scale": 1.0, "o_bias": True},
        mlp=plain_mlp(config),
        norm=NormSpec("layer", config["layer_norm_epsilon"], has_bias=True),
        windows=_windows(config),
        ropes=[None] * config["num_hidden_layers"],
        positions=LearnedPositions(config["max_position_embeddings"]),
    )


FAMILIES = (
    Family(
        architectures=("GPTNeoForCausalLM",),
        spec_from_config=spec_from_config,
        names=Names(
            prefix="transformer.",
            embed="wte",
            positions="wpe",
            norm="ln_f",
            layer="h.{}.",
            qkv=tuple(f"attn.attention.{x}_proj" for x in "qkv"),
            o="attn.attention.out_proj",
            up="mlp.c_fc",
            down="mlp.c_proj",
            attention_norm="ln_1",
            mlp_norm="ln_2",
        ),
        other_tensors=(r".*\.attn\.attention\.(masked_)?bias",),
    ),
)
