"""How an engine that makes vectors turns hidden states into them, and what of that a user may choose."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

PoolingType = Literal["CLS", "LAST", "MEAN"]
"""Which hidden states of a prompt make its one vector: the first token's, the last one's, the mean of all."""
ClassActivation = Literal["softmax", "sigmoid", "identity"]
Runner = Literal["auto", "generate", "pooling"]
Convert = Literal["auto", "none", "embed", "classify"]


@dataclass(frozen=True, slots=True)
class PoolerConfig:
    """`tasks` are what the model can do (`jaxinfer.engine.messages.PoolingTask`), the usual one first. `use_activation`:
    embeddings are normalised, and classes get their `activation`, where a request says nothing. `embed_dim`: elements of
    a hidden state. `labels` by class. An `is_matryoshka` model's embeddings may be cut to `matryoshka_dimensions` elements,
    or where it names none to any number. `is_encoder`: every token sees all of its prompt."""

    pooling_type: PoolingType
    tasks: tuple[str, ...]
    embed_dim: int
    use_activation: bool = True
    activation: ClassActivation = "softmax"
    labels: tuple[str, ...] = ()
    is_matryoshka: bool = False
    matryoshka_dimensions: tuple[int, ...] = ()
    is_encoder: bool = False
    lowercase: bool = False
    """Texts are, before they are tokenized."""

    @property
    def is_cross_encoder(self) -> bool:
        """Whether a pair of texts gets its score from the model's one class."""
        return "classify" in self.tasks and len(self.labels) == 1


_NAMES = {
    "pooling_type": "pooling_type",
    "seq_pooling_type": "pooling_type",
    "use_activation": "use_activation",
    "normalize": "use_activation",
}
"""What may be given, and the field that it sets."""


def check_given(given: Mapping[str, Any] | None) -> None:
    """Raises `ValueError` for a `pooler_config` that says what there isn't."""
    for name, value in (given or {}).items():
        if name not in _NAMES:
            raise ValueError(
                f"pooler_config has no {name!r}; it may have {', '.join(sorted(_NAMES))}."
            )
        if _NAMES[name] == "use_activation":
            if not isinstance(value, bool):
                raise ValueError(f"pooler_config: {name} must be true or false, got {value!r}.")
        elif str(value).upper() not in get_args(PoolingType):
            raise ValueError(
                f"pooler_config: {name} must be one of {get_args(PoolingType)}, got {value!r}."
            )


def with_given(config: PoolerConfig, given: Mapping[str, Any] | None) -> PoolerConfig:
    """`config` with what a user has chosen, checked before."""
    changes = {
        _NAMES[name]: value.upper() if isinstance(value, str) else value
        for name, value in (given or {}).items()
    }
    return replace(config, **changes)
