"""What distinguishes one mixture of experts from another. No JAX here, as in `spec`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from jaxinfer.models.spec import Activation, GatedMlpSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingSpec:
    """Which experts a token takes, and with what weights."""

    num_experts: int
    experts_per_token: int
    scores: Literal["softmax", "sigmoid", "sparse_mixer"] = "softmax"
    """Of the router's logits, from which experts are chosen and which are their weights. "sparse_mixer" (arXiv
    2409.12136) chooses two, one after the other, each by a softmax over those that come near it."""
    renormalize: bool = False
    """The chosen weights are divided by their sum."""
    scale: float = 1.0
    """Factor on the weights."""
    bias: bool = False
    """The router has one."""
    correction_bias: Literal["scores", "logits"] | None = None
    """A trained number per expert that is added for the choice alone, and to what."""
    num_groups: int = 1
    """Experts are chosen from `groups_per_token` of so many groups of neighbours, those of the best `group_score`: of
    their best expert, or the sum of their best two."""
    groups_per_token: int = 1
    group_score: Literal["best", "best_two"] = "best_two"
    logit_soft_cap: float | None = None
    """Logits become cap * tanh(logits / cap)."""
    mixer_jitter: float = 0.01
    """How far from the best, relative to twice its size, experts still count for the softmax of a "sparse_mixer"."""
    float32: bool = False
    """The router's weights are kept in float32."""

    def __post_init__(self) -> None:
        if not 1 <= self.experts_per_token <= self.num_experts:
            raise ValueError(
                f"experts_per_token must be between 1 and num_experts ({self.num_experts}), "
                f"got {self.experts_per_token}."
            )
        if self.num_experts % self.num_groups:
            raise ValueError(
                f"num_groups must divide num_experts ({self.num_experts}), got {self.num_groups}."
            )
        available = self.num_experts // self.num_groups * self.groups_per_token
        if not 1 <= self.groups_per_token <= self.num_groups or available < self.experts_per_token:
            raise ValueError(
                f"groups_per_token must be at most num_groups ({self.num_groups}) and leave "
                f"experts_per_token ({self.experts_per_token}) experts, got {self.groups_per_token}."
            )
        if self.scores == "sparse_mixer" and self.experts_per_token != 2:
            raise ValueError(
                f'experts_per_token must be 2 for scores "sparse_mixer", got {self.experts_per_token}.'
            )


@dataclass(frozen=True, slots=True)
class ClampedSwiglu:
    """(clip(up, -limit, limit) + 1) * g * sigmoid(alpha * g) of g = min(gate, limit), as in gpt-oss."""

    alpha: float
    limit: float


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeSpec:
    """Gated MLPs, of which each token takes a few and adds them up, weighted; and one that all take, where there is."""

    routing: RoutingSpec
    mlp_dim: int
    """Of one expert."""
    activation: Activation | ClampedSwiglu = "silu"
    bias: bool = False
    scale_inputs: bool = False
    """The weights multiply what the experts get instead of what they return."""
    output_bias: bool = False
    """A vector added to the sum of the experts."""
    shared: GatedMlpSpec | None = None
    shared_gate: bool = False
    """What the shared MLP returns is multiplied by the sigmoid of a number that the token gives."""
    shared_scale: float = 1.0
    """Factor on what the shared MLP returns."""

    def num_weights(self, embed_dim: int) -> int:
        """Of the matrices that a token goes through."""
        experts = 3 * embed_dim * self.mlp_dim * self.routing.experts_per_token
        shared = self.shared.num_weights(embed_dim) if self.shared else 0
        return experts + shared + self.routing.num_experts * embed_dim
