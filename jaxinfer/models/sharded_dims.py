"""The sizes of a model's leaves once they are cut for tensor parallelism."""

from __future__ import annotations

from dataclasses import dataclass

from jaxinfer.models.spec import DecoderSpec


@dataclass(frozen=True, slots=True)
class ShardedDims:
    """Sizes that `tensor_parallel_size` devices can share evenly, each at least the spec's own.

    Where there are more devices than kv heads, each kv head is stored `kv_replicas` times and its query heads are
    dealt out to the copies; then whole groups of zero weights are appended until the devices divide their number.
    Query heads of a group, MLP rows and vocabulary rows are filled up with zeros likewise. Zero rows change no
    result: a padded query head meets zero columns of the output projection.
    """

    tensor_parallel_size: int
    kv_replicas: int
    num_kv_heads: int
    """K, copies and padding included."""
    queries_per_kv: int
    """G, padding included."""
    mlp_dim: int
    """M"""
    vocab_size: int
    """V"""

    @classmethod
    def create(cls, spec: DecoderSpec, tensor_parallel_size: int = 1) -> ShardedDims:
        if tensor_parallel_size < 1:
            raise ValueError(
                f"tensor_parallel_size must be at least 1, got {tensor_parallel_size}."
            )
        replicas = max(1, tensor_parallel_size // spec.num_kv_heads)
        return cls(
            tensor_parallel_size=tensor_parallel_size,
            kv_replicas=replicas,
            num_kv_heads=round_up(spec.num_kv_heads * replicas, tensor_parallel_size),
            queries_per_kv=-(-(spec.num_heads // spec.num_kv_heads) // replicas),
            mlp_dim=round_up(spec.mlp_dim, tensor_parallel_size),
            vocab_size=round_up(spec.vocab_size, tensor_parallel_size),
        )


def round_up(size: int, multiple: int) -> int:
    """The first multiple from `size` on."""
    return -(-size // multiple) * multiple
