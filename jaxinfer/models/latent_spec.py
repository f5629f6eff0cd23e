"""What distinguishes one multi-head latent attention from another. No JAX here, as in `spec`."""

from __future__ import annotations

from dataclasses import dataclass

from jaxinfer.models.spec import NormSpec, RopeSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentAttentionSpec:
    """Multi-head latent attention (arXiv 2405.04434): what the cache keeps of a token are a normed latent, from which
    every head's key and value are expanded, and one rotated key that all heads share."""

    num_heads: int
    query_rank: int | None
    """Of the latent that the queries are expanded from; None where they come from the token itself."""
    latent_rank: int
    plain_dim: int
    """Of a head's query and key, without their rotated parts."""
    rope_dim: int
    value_dim: int
    query_scale: float
    """Factor on the attention scores."""
    rope: RopeSpec
    norm: NormSpec
    """Of both latents."""
    query_factor: float = 1.0
    """On the queries."""
    latent_factor: float = 1.0
    """On the normed latent that the cache keeps."""
    bias: bool = False
    """Of the projections to the latents and of the output."""

    def __post_init__(self) -> None:
        for name in ("num_heads", "latent_rank", "plain_dim", "rope_dim", "value_dim"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}.")
        if 2 * len(self.rope.inverse_frequencies) != self.rope_dim:
            raise ValueError(
                f"rope rotates {2 * len(self.rope.inverse_frequencies)} dimensions, "
                f"but rope_dim is {self.rope_dim}."
            )

    @property
    def sliding_window(self) -> None:
        """Every token sees all before it."""
        return None

    @property
    def cache_dim(self) -> int:
        """Numbers that the cache keeps of a token."""
        return self.latent_rank + self.rope_dim

    def num_weights(self, embed_dim: int) -> int:
        """Of the matrices that a token goes through."""
        query_dim = self.num_heads * (self.plain_dim + self.rope_dim)
        rank = self.query_rank
        query = embed_dim * query_dim if rank is None else rank * (embed_dim + query_dim)
        expanded = self.latent_rank * self.num_heads * (self.plain_dim + self.value_dim)
        output = self.num_heads * self.value_dim * embed_dim
        return query + embed_dim * self.cache_dim + expanded + output
