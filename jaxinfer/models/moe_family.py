"""How configs of mixtures of experts are read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from jaxinfer.models.family import Config, activation
from jaxinfer.models.moe_spec import MoeSpec, RoutingSpec
from jaxinfer.models.spec import DecoderSpec, GatedMlpSpec, MlpSpec

_NUM_EXPERTS = ("n_routed_experts", "num_experts", "num_local_experts", "moe_num_experts")
_PER_TOKEN = ("num_experts_per_tok", "moe_topk", "moe_k", "moe_top_k")


def first_of(config: Config, names: Sequence[str]) -> Any:
    """The first of several fields that the config has. Raises `ValueError` where it has none."""
    for name in names:
        if config.get(name) is not None:
            return config[name]
    raise ValueError(f"The config has none of the fields {', '.join(names)}.")


def moe_spec(
    config: Config,
    mlp_dim: int,
    *,
    shared_dim: int | None = None,
    routing: dict[str, Any] | None = None,
    **features: Any,
) -> MoeSpec:
    """A mixture from the fields that most configs share.

    Args:
        shared_dim: MLP rows of what all tokens take; None or 0 for nothing.
        routing: further fields of `RoutingSpec`.
        features: further fields of `MoeSpec`.
    """
    act = features.pop("activation", None) or activation(config)
    return MoeSpec(
        routing=RoutingSpec(
            **{
                "num_experts": first_of(config, _NUM_EXPERTS),
                "experts_per_token": first_of(config, _PER_TOKEN),
                **(routing or {}),
            }
        ),
        mlp_dim=mlp_dim,
        activation=act,
        shared=GatedMlpSpec(shared_dim, activation(config)) if shared_dim else None,
        **features,
    )


def deepseek_routing(config: Config) -> dict[str, Any]:
    """Sigmoid scores, a bias for the choice, and groups of experts, as DeepSeek-V3 has them."""
    return {
        "scores": "sigmoid",
        "correction_bias": "scores",
        "renormalize": config.get("norm_topk_prob", True),
        "scale": config.get("routed_scaling_factor") or 1.0,
        "num_groups": config.get("n_group") or 1,
        "groups_per_token": config.get("topk_group") or 1,
        "float32": True,
    }


def sparse_layers(config: Config, default: Sequence[bool]) -> list[bool]:
    """Which layers are mixtures: by the config's `mlp_layer_types`, else `default`."""
    types = config.get("mlp_layer_types")
    if types is None:
        return list(default)
    unknown = set(types) - {"dense", "sparse"}
    if unknown:
        raise ValueError(
            f"mlp_layer_types {sorted(unknown)} are not supported; supported: ['dense', 'sparse']."
        )
    if len(types) != config["num_hidden_layers"]:
        raise ValueError(
            f"mlp_layer_types must have num_hidden_layers ({config['num_hidden_layers']}) entries, "
            f"got {len(types)}."
        )
    return [kind == "sparse" for kind in types]


def after_dense(config: Config, default: int = 0) -> list[bool]:
    """A mixture in all layers but the first `first_k_dense_replace`."""
    first = config.get("first_k_dense_replace", default)
    return [i >= first for i in range(config["num_hidden_layers"])]


def with_experts(
    spec: DecoderSpec, moe: MoeSpec | Sequence[MoeSpec], sparse: Sequence[bool] | None = None
) -> DecoderSpec:
    """The decoder with a mixture in its layers, or in those that `sparse` says; `moe` may be one for each."""
    mixtures = [moe] * len(spec.layers) if isinstance(moe, MoeSpec) else list(moe)
    mlps: list[MlpSpec] = [
        mixture if sparse is None or sparse[i] else spec.layers[i].mlp
        for i, mixture in enumerate(mixtures)
    ]
    layers = (replace(layer, mlp=mlp) for layer, mlp in zip(spec.layers, mlps, strict=True))
    return replace(spec, layers=tuple(layers))
