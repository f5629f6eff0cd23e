"""What distinguishes one decoder from another, as frozen data that the shared decoder reads while it is traced.

No JAX here: families build these from a checkpoint's config, and equal specs share compiled programs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:  # which build on what is here
    from jaxinfer.models.latent_spec import LatentAttentionSpec
    from jaxinfer.models.moe_spec import MoeSpec
    from jaxinfer.models.state_spec import StateSpec

Activation = Literal["silu", "gelu", "gelu_tanh", "quick_gelu", "relu", "relu2", "xielu"]
ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "quick_gelu": "quick_gelu",
    "relu": "relu",
    "relu2": "relu2",
    "xielu": "xielu",
}
"""Names of activations in Hugging Face configs."""

NormPlacement = Literal["pre", "post", "both", "parallel", "parallel_shared", "sum"]
"""Where a layer's norms sit: before attention and MLP; after both, on what they return; before and after. "parallel":
attention and MLP side by side, each behind a norm of its own, or both behind one. "sum": on the residual stream itself,
after each addition, as in the first transformers."""


LAYER_NORMS: dict[NormPlacement, tuple[str, ...]] = {
    "pre": ("attention_norm", "mlp_norm"),
    "post": ("attention_post_norm", "mlp_post_norm"),
    "both": ("attention_norm", "attention_post_norm", "mlp_norm", "mlp_post_norm"),
    "parallel": ("attention_norm", "mlp_norm"),
    "parallel_shared": ("attention_norm",),
    "sum": ("attention_post_norm", "mlp_post_norm"),
}
"""Names of a layer's norms by where they sit."""


@dataclass(frozen=True, slots=True)
class NormSpec:
    """x / sqrt(mean(x²) + eps), and with kind "layer" of x less its mean; then times the weight, plus the bias."""

    kind: Literal["rms", "layer"] = "rms"
    eps: float = 1e-6
    has_weight: bool = True
    has_bias: bool = False
    weight_offset: float = 0.0
    """Added to every stored weight (1 where checkpoints store the difference from one)."""


@dataclass(frozen=True, slots=True)
class QKNormSpec:
    """Norms of queries and keys, before the rotation or after it.

    `over`: "head" norms each head, all with one weight [H]; "own_head" with a weight for each; "projection" norms all
    heads of a token together.
    """

    norm: NormSpec
    over: Literal["head", "own_head", "projection"] = "head"
    after_rope: bool = False

    def __post_init__(self) -> None:
        if self.over == "projection" and self.norm.kind != "rms":
            raise ValueError(f'A norm over "projection" must be of kind "rms", got {self.norm}.')


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary embedding of the first 2 * len(inverse_frequencies) of a head's dimensions; the others pass unrotated.

    Every scaling variant comes down to its frequencies (radians per position) and a factor on cosine and sine.
    """

    inverse_frequencies: tuple[float, ...]
    attention_factor: float = 1.0


@dataclass(frozen=True, slots=True)
class QueryTemperature:
    """Queries are multiplied by 1 + scale * log(1 + floor((position + offset) / period)), so that attention stays sharp
    in long contexts."""

    scale: float
    period: float
    offset: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSpec:
    """How one layer attends: grouped queries over keys and values of its own."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    query_scale: float
    """Factor on the attention scores."""
    rope: RopeSpec | None
    """None: queries and keys don't know their positions."""
    temperature: QueryTemperature | None = None
    sliding_window: int | None = None
    """A token sees itself and the `sliding_window - 1` tokens before it."""
    alibi_slopes: tuple[float, ...] | None = None
    """Per head, what a score loses for each token between query and key."""
    soft_cap: float | None = None
    """Scores become cap * tanh(score / cap)."""
    sinks: bool = False
    """Each head has a learned score that joins the softmax without a value."""
    qk_norm: QKNormSpec | None = None
    qkv_bias: bool = False
    o_bias: bool = False
    gated: bool = False
    """Each head's result is multiplied by the sigmoid of a projection of its own."""
    out_scale: float = 1.0
    """Factor on what attention returns."""
    qkv_clip: float | None = None
    """Queries, keys and values are cut to [-clip, clip]."""

    def __post_init__(self) -> None:
        if self.head_dim < 1:
            raise ValueError(f"head_dim must be at least 1, got {self.head_dim}.")
        if self.num_kv_heads < 1 or self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads ({self.num_heads}) must be a multiple of num_kv_heads "
                f"({self.num_kv_heads})."
            )
        if self.sliding_window is not None and self.sliding_window < 1:
            raise ValueError(
                f"sliding_window must be at least 1 or None, got {self.sliding_window}."
            )
        if self.rope is not None and 2 * len(self.rope.inverse_frequencies) > self.head_dim:
            raise ValueError(
                f"rope rotates {2 * len(self.rope.inverse_frequencies)} dimensions, "
                f"but head_dim is {self.head_dim}."
            )
        if self.alibi_slopes is not None and len(self.alibi_slopes) != self.num_heads:
            raise ValueError(
                f"alibi_slopes must have one entry per head ({self.num_heads}), "
                f"got {len(self.alibi_slopes)}."
            )

    def num_weights(self, embed_dim: int) -> int:
        """Of the matrices that a token goes through."""
        query_rows = (3 if self.gated else 2) * self.num_heads
        return embed_dim * self.head_dim * (query_rows + 2 * self.num_kv_heads)


@dataclass(frozen=True, slots=True)
class GatedMlpSpec:
    """out_scale * down(activation(gate_scale * gate(x)) * up(x))"""

    mlp_dim: int
    activation: Activation = "silu"
    bias: bool = False
    gate_scale: float = 1.0
    out_scale: float = 1.0

    def __post_init__(self) -> None:
        if self.activation == "xielu":
            raise ValueError('activation "xielu" is not supported in a gated MLP.')

    def num_weights(self, embed_dim: int) -> int:
        """Of the matrices that a token goes through."""
        return 3 * embed_dim * self.mlp_dim


@dataclass(frozen=True, slots=True)
class PlainMlpSpec:
    """down(activation(up(x)))"""

    mlp_dim: int
    activation: Activation = "gelu"
    """"xielu" has trained parameters."""
    bias: bool = True

    def num_weights(self, embed_dim: int) -> int:
        """Of the matrices that a token goes through."""
        return 2 * embed_dim * self.mlp_dim


type AnyAttentionSpec = AttentionSpec | LatentAttentionSpec
type MlpSpec = GatedMlpSpec | PlainMlpSpec | MoeSpec


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """What a layer has of attention, states and an MLP; attention and states stand side by side, in one place."""

    attention: AnyAttentionSpec | None
    mlp: MlpSpec | None
    norms: NormPlacement = "pre"
    residual_scale: float = 1.0
    """Factor on what attention and MLP return, before it joins the residual stream."""
    state: StateSpec | None = None

    def __post_init__(self) -> None:
        if not self.has_mixer and self.mlp is None:
            raise ValueError("A layer must have attention, a state or an MLP.")
        if (not self.has_mixer or self.mlp is None) and self.norms not in ("pre", "post", "both"):
            raise ValueError(
                f'norms must be "pre", "post" or "both" where a layer has no MLP or nothing else, got {self.norms!r}.'
            )

    @property
    def has_mixer(self) -> bool:
        """Whether its tokens see others."""
        return self.attention is not None or self.state is not None

    @property
    def norm_names(self) -> tuple[str, ...]:
        return tuple(
            name
            for name in LAYER_NORMS[self.norms]
            if (self.mlp is not None if name.startswith("mlp") else self.has_mixer)
        )

    @property
    def first_norm(self) -> str:
        """The norm before all else, where the layer has one there."""
        return "attention_norm" if self.has_mixer else "mlp_norm"

    def num_weights(self, embed_dim: int) -> int:
        """Of the matrices that a token goes through."""
        parts = (self.attention, self.state, self.mlp)
        return sum(part.num_weights(embed_dim) for part in parts if part is not None)


@dataclass(frozen=True, slots=True)
class LearnedPositions:
    """A trained vector for each position, in row position + `offset` of a table."""

    num_rows: int
    offset: int = 0


@dataclass(frozen=True, slots=True)
class SinusoidalPositions:
    """Sines, then cosines, of (position + offset) * frequency."""

    frequencies: tuple[float, ...]
    offset: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderSpec:
    """A decoder-only transformer: layers between an embedding and a head."""

    vocab_size: int
    max_position_embeddings: int
    embed_dim: int
    layers: tuple[LayerSpec, ...]
    norm: NormSpec
    """Of the layers, and of what the last one returns."""
    final_norm: bool = True
    tied_head: bool
    """The head is the embedding matrix."""
    head_bias: bool = False
    positions: LearnedPositions | SinusoidalPositions | None = None
    """Added to the embedded tokens."""
    embed_norm: bool = False
    """The embedded tokens are normed before the first layer."""
    embed_scale: float | None = None
    """Factor on the embedded tokens, rounded to the compute dtype first."""
    logit_scale: float | None = None
    """Factor on the logits."""
    logit_soft_cap: float | None = None
    """Logits become cap * tanh(logits / cap)."""

    def __post_init__(self) -> None:
        for name in ("vocab_size", "max_position_embeddings", "embed_dim"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}.")
        if not self.layers:
            raise ValueError("layers must hold at least one layer.")

    @property
    def has_states(self) -> bool:
        """Whether a request leaves more behind than keys and values."""
        return any(layer.state is not None for layer in self.layers)

    @property
    def attentions(self) -> tuple[AnyAttentionSpec, ...]:
        """Of the layers that have attention."""
        return tuple(layer.attention for layer in self.layers if layer.attention is not None)
