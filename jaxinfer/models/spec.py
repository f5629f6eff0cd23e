"""What distinguishes one decoder from another, as frozen data that the shared decoder reads while it is traced.

No JAX here: families build these from a checkpoint's config, and equal specs share compiled programs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Activation = Literal["silu", "gelu", "gelu_tanh"]
ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
}
"""Names of activations in Hugging Face configs."""


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary embedding of the first 2 * len(inverse_frequencies) of a head's dimensions; the others pass unrotated.

    Every scaling variant comes down to its frequencies (radians per position) and a factor on cosine and sine.
    """

    inverse_frequencies: tuple[float, ...]
    attention_factor: float = 1.0


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """How one layer attends. With a window, a token sees itself and the `sliding_window - 1` tokens before it."""

    rope: RopeSpec
    sliding_window: int | None = None


@dataclass(frozen=True, slots=True)
class DecoderSpec:
    """A decoder-only transformer: pre-norm residual blocks of grouped-query attention and a gated MLP."""

    vocab_size: int
    max_position_embeddings: int
    embed_dim: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    mlp_dim: int
    layers: tuple[AttentionSpec, ...]
    activation: Activation
    norm_eps: float
    query_scale: float
    """Factor on the attention scores."""
    tied_head: bool
    """The head is the embedding matrix."""
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    """RMS norm of each query and key head before the rotation."""
    norm_weight_offset: float = 0.0
    """Added to every stored norm weight (1 where checkpoints store the difference from one)."""
    post_norms: bool = False
    """Norms of what attention and MLP return, before the residual additions."""
    embed_scale: float | None = None
    """Factor on the embedded tokens, rounded to the compute dtype first."""
    logit_soft_cap: float | None = None
    """Logits become cap * tanh(logits / cap)."""

    def __post_init__(self) -> None:
        for name in ("vocab_size", "max_position_embeddings", "embed_dim", "head_dim", "mlp_dim"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}.")
        if self.num_kv_heads < 1 or self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads ({self.num_heads}) must be a multiple of num_kv_heads "
                f"({self.num_kv_heads})."
            )
        if not self.layers:
            raise ValueError("layers must hold at least one layer.")
        for layer in self.layers:
            if layer.sliding_window is not None and layer.sliding_window < 1:
                raise ValueError(
                    f"sliding_window must be at least 1 or None, got {layer.sliding_window}."
                )
            if 2 * len(layer.rope.inverse_frequencies) > self.head_dim:
                raise ValueError(
                    f"rope rotates {2 * len(layer.rope.inverse_frequencies)} dimensions, "
                    f"but head_dim is {self.head_dim}."
                )
