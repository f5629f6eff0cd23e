"""How recurrent heads are shared by devices. No JAX here, as checkpoints are planned by it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ShardedGroups:
    """Groups of heads that `tensor_parallel_size` devices share evenly.

    Where there are more devices than groups, what a group's heads have in common is stored `copies` times and its heads
    are dealt out to the copies.
    """

    num_groups: int
    """G, copies included."""
    heads_per_group: int
    """Q"""
    copies: int

    @classmethod
    def create(cls, num_groups: int, num_heads: int, tensor_parallel_size: int) -> ShardedGroups:
        """Raises `ValueError` where they can't be shared evenly."""
        devices, per_group = tensor_parallel_size, num_heads // num_groups
        copies = 1 if num_groups % devices == 0 else devices // num_groups
        if num_groups * copies % devices or copies < 1 or per_group % copies:
            raise ValueError(
                f"tensor_parallel_size ({devices}) must divide the model's {num_groups} groups of recurrent heads, or be "
                f"a multiple of them that divides its {num_heads} heads."
            )
        return cls(num_groups * copies, per_group // copies, copies)
