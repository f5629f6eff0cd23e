"""What a family of checkpoints provides, and how configs are read."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jaxinfer.models.checkpoint_layout import LLAMA_NAMES, Names, decoder_plan
from jaxinfer.models.rope_config import (
    complete_rope_parameters,
    rope_parameters,
    rope_spec,
    scaled_max_positions,
)
from jaxinfer.models.sharded_dims import ShardedDims
from jaxinfer.models.spec import (
    ACTIVATIONS,
    Activation,
    AttentionSpec,
    DecoderSpec,
    GatedMlpSpec,
    LayerSpec,
    MlpSpec,
    NormPlacement,
    NormSpec,
    PlainMlpSpec,
    QKNormSpec,
    RopeSpec,
)
from jaxinfer.models.state_spec import StateSpec
from jaxinfer.weights.plan import LoadPlan

Config = Mapping[str, Any]
"""A checkpoint's config.json."""


_REDUNDANT = (r".*\brotary_emb\.(inv_freq|cos_cached|sin_cached)", r".*\battn\.masked_bias")
"""Tensors of older checkpoints that hold nothing a config doesn't."""

_MIXED_KINDS = ("full_attention", "linear_attention")


@dataclass(frozen=True, slots=True)
class Family:
    """What a checkpoint's config and tensors are to the shared decoder.

    `spec_from_config(config, max_model_len)`: `max_model_len` is the longest request to be served, None for the
    longest that the model can take. `other_tensors`: regular expressions (full match) of tensors of this family's
    checkpoints that the decoder has no use for."""

    architectures: tuple[str, ...]
    spec_from_config: Callable[[Config, int | None], DecoderSpec]
    names: Names | Callable[[Config], Names] = LLAMA_NAMES
    """What its tensors are called."""
    checkpoint_plan: Callable[[Config, DecoderSpec, ShardedDims], LoadPlan] | None = None
    """Where names can't say it."""
    other_tensors: tuple[str, ...] = ()
    model_types: tuple[str, ...] = ()
    """Where the architecture is one that other families have too: it counts for configs of these types."""
    further_layers: bool = False
    """Checkpoints may hold a layer after the last one, which predicts a further token."""

    def plan(self, config: Config, spec: DecoderSpec, dims: ShardedDims) -> LoadPlan:
        """How each leaf is made from the checkpoint's tensors."""
        if self.checkpoint_plan is not None:
            return self.checkpoint_plan(config, spec, dims)
        return decoder_plan(spec, dims, self.tensor_names(config))

    def tensor_names(self, config: Config) -> Names:
        return self.names if isinstance(self.names, Names) else self.names(config)

    def ignored_tensors(self, spec: DecoderSpec) -> tuple[str, ...]:
        """Regular expressions (full match) of all tensors that checkpoints may hold and the decoder doesn't read."""
        # Some checkpoints with a tied head store it a second time.
        head = (r"(.*\.)?lm_head\.weight",) if spec.tied_head else ()
        further = (rf".*\blayers\.{len(spec.layers)}\..*",) if self.further_layers else ()
        return (*_REDUNDANT, *head, *further, *self.other_tensors)


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


def renamed(config: Config, names: Mapping[str, str], **defaults: Any) -> dict[str, Any]:
    """The config with some of its fields under the names that others use, and defaults for what it leaves out.

    A field that is None counts as left out.
    """
    given = {names.get(key, key): value for key, value in config.items() if value is not None}
    return defaults | given


def refuse(config: Config, **supported: Any) -> None:
    """Raises `ValueError` where a field of the config has another value than the one that is supported."""
    for key, value in supported.items():
        if config.get(key, value) != value:
            raise ValueError(f"{key} {config[key]!r} is not supported; supported: {value!r}.")


def plain_mlp(config: Config, bias: bool = True) -> PlainMlpSpec:
    """Without a gate; four times as wide as the model where `intermediate_size` is left out."""
    width = config.get("intermediate_size") or 4 * config["hidden_size"]
    return PlainMlpSpec(width, activation(config), bias)


def layer_kinds(
    config: Config, default: Sequence[str], known: Collection[str] = _MIXED_KINDS
) -> Sequence[str]:
    """The config's `layer_types`, else `default`. Raises `ValueError` for one that is not `known`."""
    kinds = config.get("layer_types") or default
    unknown = set(kinds) - set(known)
    if unknown:
        raise ValueError(
            f"layer_types {sorted(unknown)} are not supported; supported: {sorted(known)}."
        )
    if len(kinds) != config["num_hidden_layers"]:
        raise ValueError(
            f"layer_types must have num_hidden_layers ({config['num_hidden_layers']}) entries, "
            f"got {len(kinds)}."
        )
    return kinds


def step_limits(config: Config) -> tuple[float, float]:
    """The shortest and longest step of a state-space layer. Infinity, which JSON has no number for, may be an object."""
    low, high = (
        float(limit["__float__"] if isinstance(limit, Mapping) else limit)
        for limit in config.get("time_step_limit") or (0.0, math.inf)
    )
    return low, high


def with_states(spec: DecoderSpec, states: Sequence[StateSpec | None]) -> DecoderSpec:
    """By layer, a state in place of its attention; None leaves it as it is."""
    layers = zip(spec.layers, states, strict=True)
    return replace(
        spec,
        layers=tuple(
            layer if state is None else replace(layer, attention=None, state=state)
            for layer, state in layers
        ),
    )


def rms_head_norm(eps: float, weight_offset: float = 0.0) -> QKNormSpec:
    """RMS norms of each query and key head before the rotation, as most models with such norms have them."""
    return QKNormSpec(NormSpec("rms", eps, weight_offset=weight_offset))


def config_rope(config: Config, max_model_len: int | None) -> tuple[RopeSpec, int]:
    """The one rotary embedding of the config's fields, and the longest sequence that it covers."""
    parameters = rope_parameters(config)
    longest = scaled_max_positions(parameters, config["max_position_embeddings"])
    positions = config["max_position_embeddings"]
    return rope_spec(parameters, head_dim(config), positions, max_model_len or longest), longest


def layer_type_ropes(
    config: Config, max_model_len: int | None, windows: Sequence[int | None]
) -> list[RopeSpec]:
    """By layer, where those with a window have rotary parameters of their own.

    `rope_parameters` has those of "full_attention" and "sliding_attention" layers; the older `rope_scaling` is that of
    the full layers.
    """
    by_type = config.get("rope_parameters") or {"full_attention": config.get("rope_scaling")}
    if "full_attention" not in by_type:
        by_type = {"full_attention": by_type, "sliding_attention": by_type}
    theta = config.get("rope_theta", 10000.0)
    thetas = {
        "full_attention": theta,
        "sliding_attention": config.get("rope_local_base_freq", theta),
    }
    positions = config["max_position_embeddings"]
    full, sliding = (
        rope_spec(
            complete_rope_parameters(config, by_type.get(kind) or {}, thetas[kind]),
            head_dim(config),
            positions,
            max_model_len or positions,
        )
        for kind in thetas
    )
    return [full if window is None else sliding for window in windows]


def llama_like_spec(
    config: Config,
    max_model_len: int | None,
    *,
    attention: Mapping[str, Any] | None = None,
    mlp: MlpSpec | None = None,
    mlp_bias: bool = False,
    norm: NormSpec | None = None,
    norm_eps: float = 1e-6,
    norms: NormPlacement = "pre",
    residual_scale: float = 1.0,
    windows: Sequence[int | None] | None = None,
    ropes: Sequence[RopeSpec | None] | None = None,
    **features: Any,
) -> DecoderSpec:
    """A spec from the fields that most configs share, and what differs from Llama.

    Args:
        attention: further fields of every layer's `AttentionSpec`.
        mlp: default: gated, of `intermediate_size`, `hidden_act` and `mlp_bias`.
        norm: default: RMS with the config's `rms_norm_eps`, or `norm_eps` where it has none.
        windows, ropes: by layer its sliding window, and its rotary embedding. Default: none has a window, and all have
            the rotary embedding that the config's fields describe.
        features: further fields of `DecoderSpec`.
    """
    num_layers, num_heads = config["num_hidden_layers"], config["num_attention_heads"]
    dim = head_dim(config)
    longest = config["max_position_embeddings"]
    if ropes is None:
        rope, longest = config_rope(config, max_model_len)
        ropes = [rope] * num_layers
    every = AttentionSpec(
        **{
            "num_heads": num_heads,
            "num_kv_heads": config.get("num_key_value_heads") or num_heads,
            "head_dim": dim,
            "query_scale": dim**-0.5,
            "rope": None,
            **(attention or {}),
        }
    )
    if mlp is None:
        mlp = GatedMlpSpec(config["intermediate_size"], activation(config), mlp_bias)
    layers = tuple(
        LayerSpec(replace(every, rope=rope, sliding_window=window), mlp, norms, residual_scale)
        for rope, window in zip(ropes, windows or [None] * num_layers, strict=True)
    )
    return DecoderSpec(
        **{
            "vocab_size": config["vocab_size"],
            "max_position_embeddings": longest,
            "embed_dim": config["hidden_size"],
            "layers": layers,
            "norm": norm or NormSpec("rms", config.get("rms_norm_eps", norm_eps)),
            "tied_head": config.get("tie_word_embeddings", False),
            **features,
        }
    )
