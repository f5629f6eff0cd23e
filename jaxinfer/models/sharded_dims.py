"""The sizes of a model's leaves once they are cut for tensor parallelism."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from jaxinfer.models.spec import AttentionSpec, DecoderSpec


@dataclass(frozen=True, slots=True)
class ShardedHeads:
    """The heads of one layer's attention, so many that `tensor_parallel_size` devices can share them evenly.

    Where there are more devices than kv heads, each kv head is stored `kv_replicas` times and its query heads are
    dealt out to the copies; then whole groups of zero weights are appended until the devices divide their number.
    Query heads of a group are filled up with zeros likewise. Zero rows change no result: a padded query head meets zero
    columns of the output projection.
    """

    kv_replicas: int
    num_kv_heads: int
    """K, copies and padding included."""
    queries_per_kv: int
    """G, padding included."""

    @classmethod
    def create(cls, attention: AttentionSpec, tensor_parallel_size: int) -> ShardedHeads:
        replicas = max(1, tensor_parallel_size // attention.num_kv_heads)
        return cls(
            kv_replicas=replicas,
            num_kv_heads=round_up(attention.num_kv_heads * replicas, tensor_parallel_size),
            queries_per_kv=-(-(attention.num_heads // attention.num_kv_heads) // replicas),
        )

    def deal_queries(self, x: np.ndarray) -> np.ndarray:
        """[K, G, ...] of the model -> [K', G', ...]: a group's query heads, dealt out to the copies of its kv head."""
        x = pad_axis(x, axis=1, size=self.kv_replicas * self.queries_per_kv)
        x = x.reshape(x.shape[0] * self.kv_replicas, self.queries_per_kv, *x.shape[2:])
        return pad_axis(x, axis=0, size=self.num_kv_heads)

    def copy_keys(self, x: np.ndarray) -> np.ndarray:
        """[K, ...] of the model -> [K', ...]."""
        return pad_axis(np.repeat(x, self.kv_replicas, axis=0), axis=0, size=self.num_kv_heads)


@dataclass(frozen=True, slots=True)
class ShardedDims:
    """Sizes that `tensor_parallel_size` devices can share evenly, each at least the spec's own. MLP and vocabulary rows
    are filled up with zeros, as are heads."""

    tensor_parallel_size: int
    vocab_size: int
    """V"""
    expert_parallel: bool = False
    """The devices share the experts of a mixture, and not each expert's MLP rows."""

    @classmethod
    def create(
        cls, spec: DecoderSpec, tensor_parallel_size: int = 1, *, expert_parallel: bool = False
    ) -> ShardedDims:
        if tensor_parallel_size < 1:
            raise ValueError(
                f"tensor_parallel_size must be at least 1, got {tensor_parallel_size}."
            )
        vocab_size = round_up(spec.vocab_size, tensor_parallel_size)
        return cls(tensor_parallel_size, vocab_size, expert_parallel)

    def heads(self, attention: AttentionSpec) -> ShardedHeads:
        return ShardedHeads.create(attention, self.tensor_parallel_size)

    def mlp_dim(self, mlp_dim: int) -> int:
        """M"""
        return self.shared_by_devices(mlp_dim)

    def shared_by_devices(self, size: int) -> int:
        """The first multiple from `size` on that the devices can share evenly."""
        return round_up(size, self.tensor_parallel_size)


def round_up(size: int, multiple: int) -> int:
    """The first multiple from `size` on."""
    return -(-size // multiple) * multiple


def pad_axis(x: np.ndarray, axis: int, size: int) -> np.ndarray:
    """Zeros appended up to `size`; the array itself where nothing is missing."""
    if x.shape[axis] == size:
        return x
    widths = [(0, size - x.shape[axis] if i == axis else 0) for i in range(x.ndim)]
    return np.pad(x, widths)
