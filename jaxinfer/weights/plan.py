"""How a model's leaves are made from a checkpoint's tensors, as data.

A model family writes one `LeafSource` per leaf; the loader reads, checks, assembles and places one leaf at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

LeafPath = tuple[str, ...]
"""Where a leaf sits in the model's tree, e.g. ("layers", "3", "qkv")."""

Assemble = Callable[[list[np.ndarray]], np.ndarray]


def sole(tensors: list[np.ndarray]) -> np.ndarray:
    """The assembly of a leaf that is one tensor as it stands."""
    (tensor,) = tensors
    return tensor


@dataclass(frozen=True, slots=True)
class LeafSource:
    """One leaf: the checkpoint tensors it is made of, in order, and how.

    `shapes[i]` is what tensor `names[i]` must have in the checkpoint. `assemble` gets those tensors, already in the
    leaf's dtype, and returns an array of the leaf's shape; it may return one of them, or a view. It moves values (stacks,
    splits, pads with zeros) and computes none, as the tensors are rounded before it sees them. `otherwise` is what the
    checkpoint may hold instead.
    """

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    assemble: Assemble = sole
    otherwise: LeafSource | None = None

    def __post_init__(self) -> None:
        if len(self.names) != len(self.shapes):
            raise ValueError(
                f"names and shapes must have one entry per tensor, got {len(self.names)} and "
                f"{len(self.shapes)} for {self.names}."
            )

    def or_else(self, other: LeafSource) -> LeafSource:
        """This, or `other` where a checkpoint doesn't hold what this is made of."""
        return replace(self, otherwise=other)

    def renamed(self, rename: Callable[[str], str]) -> LeafSource:
        """The same of tensors that are called differently."""
        other = self.otherwise and self.otherwise.renamed(rename)
        return replace(self, names=tuple(map(rename, self.names)), otherwise=other)


LoadPlan = dict[LeafPath, LeafSource]


def stacked(names: Sequence[str], shape: tuple[int, ...]) -> LeafSource:
    """A leaf `[len(names), *shape]` of equally shaped tensors (gate and up, experts)."""
    return LeafSource(tuple(names), (shape,) * len(names), np.stack)


def leaf_plan(shapes: Mapping[LeafPath, tuple[int, ...]]) -> LoadPlan:
    """The plan for a checkpoint that holds leaves: each is the tensor named by its path, joined with dots."""
    return {path: LeafSource((".".join(path),), (shape,)) for path, shape in shapes.items()}
