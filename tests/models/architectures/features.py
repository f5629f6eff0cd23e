"""What a `DecoderSpec` says, as names: what the few entries that every run proves have to cover between them."""

from __future__ import annotations

import dataclasses
from typing import Any

from jaxinfer.models.registry import describe_model
from jaxinfer.models.spec import DecoderSpec
from tests.models.architectures.entry import Entry, transformers_config

_SIZES = {
    "vocab_size",
    "max_position_embeddings",
    "embed_dim",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "query_scale",
    "mlp_dim",
    "layers",
    "eps",
    "inverse_frequencies",
    "num_rows",
    "frequencies",
}
"""Fields that every model has; their values are no features."""


def spec_of(wanted: Entry) -> DecoderSpec:
    model_class, config = transformers_config(wanted)
    fields = config.to_dict() | {"architectures": [model_class.__name__]}
    return describe_model(fields, max_model_len=64).spec


def features(spec: DecoderSpec) -> set[str]:
    """For instance "attention.qk_norm.over head": fields that are set, with their values where these are words."""
    found = _features("", spec)
    for layer in spec.layers:
        found |= _features("", layer)
    return found


def _features(prefix: str, part: Any) -> set[str]:
    found: set[str] = set()
    for field in dataclasses.fields(part):
        value, name = getattr(part, field.name), f"{prefix}{field.name}"
        if field.name in _SIZES or value is None or value is False:
            continue
        if dataclasses.is_dataclass(value):
            found |= {f"{name} {type(value).__name__}", *_features(f"{name}.", value)}
        elif isinstance(value, str):
            found.add(f"{name} {value}")
        elif isinstance(value, bool) or value != field.default:
            found.add(name)
    return found
