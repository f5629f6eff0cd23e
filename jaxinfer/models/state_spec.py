"""Layers that remember a request in states of fixed size instead of keys and values, as frozen data. No JAX here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from jaxinfer.models.spec import Activation


@dataclass(frozen=True, slots=True, kw_only=True)
class MambaSpec:
    """A selective scan (arXiv 2312.00752): every channel has a state, steps and both its vectors depend on the token."""

    inner_dim: int
    state_dim: int
    step_rank: int
    """Of the projection that makes the steps."""
    conv_kernel: int
    conv_bias: bool = True
    bias: bool = False
    """Of the projections in and out."""
    activation: Activation = "silu"
    step_norms: Literal["none", "plain", "weighted"] = "none"
    """RMS norms of what makes steps and vectors, without weights or with them."""
    norm_eps: float = 1e-6

    def num_weights(self, embed_dim: int) -> int:
        """Of the matrices that a token goes through."""
        inner = self.inner_dim
        return 3 * embed_dim * inner + 2 * inner * (self.step_rank + self.state_dim)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mamba2Spec:
    """Its form with one decay a head (arXiv 2405.21060); `num_groups` groups of heads share their two vectors."""

    num_heads: int
    head_dim: int
    num_groups: int
    state_dim: int
    conv_kernel: int
    conv_bias: bool = True
    in_bias: bool = False
    out_bias: bool = False
    activation: Activation = "silu"
    norm: Literal["none", "before_gate", "after_gate"] = "after_gate"
    """An RMS norm of each group, before or after the gate is multiplied in."""
    norm_eps: float = 1e-5
    step_limits: tuple[float, float] = (0.0, float("inf"))
    input_scale: float = 1.0
    part_scales: tuple[float, float, float, float, float] | None = None
    """Factors on the projected gate, input, two vectors and step."""
    out_scale: float = 1.0

    def __post_init__(self) -> None:
        if self.num_groups < 1 or self.num_heads % self.num_groups:
            raise ValueError(
                f"num_heads ({self.num_heads}) must be a multiple of num_groups ({self.num_groups})."
            )

    def num_weights(self, embed_dim: int) -> int:
        """Of the matrices that a token goes through."""
        inner = self.num_heads * self.head_dim
        rows = 3 * inner + 2 * self.num_groups * self.state_dim + self.num_heads
        return embed_dim * rows


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaNetSpec:
    """The gated delta rule (arXiv 2412.06464); a key head serves `num_value_heads / num_key_heads` value heads."""

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    conv_kernel: int
    activation: Activation = "silu"
    norm_eps: float = 1e-6
    max_beta: float = 1.0
    """How much of what a key finds may be replaced; 2 turns it round."""

    def __post_init__(self) -> None:
        if self.num_key_heads < 1 or self.num_value_heads % self.num_key_heads:
            raise ValueError(
                f"num_value_heads ({self.num_value_heads}) must be a multiple of num_key_heads "
                f"({self.num_key_heads})."
            )

    def num_weights(self, embed_dim: int) -> int:
        """Of the matrices that a token goes through."""
        keys, values = self.num_key_heads * self.key_dim, self.num_value_heads * self.value_dim
        return embed_dim * (2 * keys + 3 * values + 2 * self.num_value_heads)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShortConvSpec:
    """A gated convolution over the last few tokens, of as many channels as the residual stream has."""

    conv_kernel: int
    bias: bool = False

    def num_weights(self, embed_dim: int) -> int:
        """Of the matrices that a token goes through."""
        return 4 * embed_dim * embed_dim


@dataclass(frozen=True, slots=True, kw_only=True)
class RgLruSpec:
    """A real-gated linear recurrence (arXiv 2402.19427), its channels in blocks with gates of their own."""

    num_blocks: int
    block_dim: int
    conv_kernel: int
    activation: Activation = "gelu_tanh"

    def num_weights(self, embed_dim: int) -> int:
        """Of the matrices that a token goes through."""
        channels = self.num_blocks * self.block_dim
        return 3 * embed_dim * channels + 2 * channels * self.block_dim


@dataclass(frozen=True, slots=True, kw_only=True)
class KimiDeltaSpec:
    """The gated delta rule with a decay for each channel of a key (arXiv 2510.26692)."""

    num_heads: int
    head_dim: int
    conv_kernel: int
    gate_rank: int
    """Of the projections that make decays and gates."""
    activation: Activation = "silu"
    norm_eps: float = 1e-5

    def num_weights(self, embed_dim: int) -> int:
        """Of the matrices that a token goes through."""
        channels = self.num_heads * self.head_dim
        gates = 2 * self.gate_rank * (embed_dim + channels)
        return embed_dim * (4 * channels + self.num_heads) + gates


StateSpec = MambaSpec | Mamba2Spec | DeltaNetSpec | KimiDeltaSpec | ShortConvSpec | RgLruSpec
