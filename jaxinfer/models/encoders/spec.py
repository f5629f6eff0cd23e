"""What an encoder is, as data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from jaxinfer.models.spec import Activation


@dataclass(frozen=True, slots=True)
class HeadSpec:
    """Hidden states to classes: a dense layer with an activation (None: there is none), then one logit per class."""

    num_classes: int
    dense: Literal["tanh", "relu"] | None


@dataclass(frozen=True, slots=True)
class EncoderSpec:
    """Norms come after each addition. The first token has position `first_position`; `num_types` is 0 where texts of a
    pair are not told apart."""

    vocab_size: int
    embed_dim: int
    num_layers: int
    num_heads: int
    mlp_dim: int
    activation: Activation
    norm_eps: float
    num_positions: int
    first_position: int = 0
    num_types: int = 0
    head: HeadSpec | None = None

    @property
    def max_tokens(self) -> int:
        """Of a text."""
        return self.num_positions - self.first_position

    @property
    def head_dim(self) -> int:
        return self.embed_dim // self.num_heads
