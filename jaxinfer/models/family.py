"""What a family of checkpoints provides, and how configs are read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from jaxinfer.models.rope_config import rope_parameters, rope_spec, scaled_max_positions
from jaxinfer.models.sharded_dims import ShardedDims
from jaxinfer.models.spec import ACTIVATIONS, Activation, AttentionSpec, DecoderSpec
from jaxinfer.weights.plan import LoadPlan

Config = Mapping[str, Any]
"""A checkpoint's config.json."""


_REDUNDANT = (r".*\brotary_emb\.(inv_freq|cos_cached|sin_cached)", r".*\battn\.masked_bias")
"""Tensors of older checkpoints that hold nothing a config doesn't."""


@dataclass(frozen=True, slots=True)
class Family:
    """`spec_from_config(config, max_model_len)`: `max_model_len` is the longest request to be served, None for the
    longest that the model can take. `other_tensors`: regular expressions (full match) of tensors of this family's
    checkpoints that the decoder has no use for."""

    architectures: tuple[str, ...]
    spec_from_config: Callable[[Config, int | None], DecoderSpec]
    checkpoint_plan: Callable[[Config, DecoderSpec, ShardedDims], LoadPlan]
    other_tensors: tuple[str, ...] = ()

    def ignored_tensors(self, spec: DecoderSpec) -> tuple[str, ...]:
        """Regular expressions (full match) of all tensors that checkpoints may hold and the decoder doesn't read."""
        # Some checkpoints with a tied head store it a second time.
        head = (r"(.*\.)?lm_head\.weight",) if spec.tied_head else ()
        return (*_REDUNDANT, *head, *self.other_tensors)


def activation(config: Config, key: str = "hidden_act", default: str = "silu") -> Activation:
    """Raises `ValueError` when the config's activation is not one that the decoder has."""
    name = config.get(key, default)
    if name not in ACTIVATIONS:
        raise ValueError(f"{key} {name!r} is not supported; supported: {sorted(ACTIVATIONS)}.")
    return ACTIVATIONS[name]


def head_dim(config: Config) -> int:
    return config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]


def sliding_windows(config: Config, default: list[int | None]) -> list[int | None]:
    """The window of each layer, None for full attention: by the config's `layer_types`, else `default`."""
    types = config.get("layer_types")
    if types is None:
        return default
    known = {"full_attention": None, "sliding_attention": config.get("sliding_window")}
    unknown = set(types) - set(known)
    if unknown:
        raise ValueError(
            f"layer_types {sorted(unknown)} are not supported; supported: {sorted(known)}."
        )
    if len(types) != config["num_hidden_layers"]:
        raise ValueError(
            f"layer_types must have num_hidden_layers ({config['num_hidden_layers']}) entries, "
            f"got {len(types)}."
        )
    return [known[layer_type] for layer_type in types]


def qwen_windows(config: Config) -> list[int | None]:
    """Qwen's older form: the layers from `max_window_layers` on slide, when `use_sliding_window` is set."""
    num_layers = config["num_hidden_layers"]
    if not config.get("use_sliding_window", False):
        return [None] * num_layers
    first = config.get("max_window_layers", 28)
    window = config.get("sliding_window", 4096)
    return sliding_windows(config, [window if i >= first else None for i in range(num_layers)])


def llama_like_spec(
    config: Config,
    max_model_len: int | None,
    *,
    windows: list[int | None] | None = None,
    norm_eps: float = 1e-6,
    **features: Any,
) -> DecoderSpec:
    """A spec from the fields that most configs share; `features` are further fields of `DecoderSpec`."""
    num_layers, num_heads = config["num_hidden_layers"], config["num_attention_heads"]
    dim = head_dim(config)
    parameters = rope_parameters(config)
    longest = scaled_max_positions(parameters, config["max_position_embeddings"])
    rope = rope_spec(parameters, dim, config["max_position_embeddings"], max_model_len or longest)
    return DecoderSpec(
        vocab_size=config["vocab_size"],
        max_position_embeddings=longest,
        embed_dim=config["hidden_size"],
        num_heads=num_heads,
        num_kv_heads=config.get("num_key_value_heads") or num_heads,
        head_dim=dim,
        mlp_dim=config["intermediate_size"],
        layers=tuple(AttentionSpec(rope, w) for w in windows or [None] * num_layers),
        activation=activation(config),
        norm_eps=config.get("rms_norm_eps", norm_eps),
        query_scale=dim**-0.5,
        tied_head=config.get("tie_word_embeddings", False),
        **features,
    )
