"""A model's part of the device's memory, which it can give away and take back."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

import jax
import numpy as np

from jaxinfer.executor import kv_cache
from jaxinfer.models.decoder import KVCache


class Owner(Protocol):
    """Who runs with these arrays."""

    leaves: list[jax.Array]
    kv_cache: KVCache


class Resident:
    def __init__(
        self,
        owner: Owner,
        leaf_shapes: Iterable[jax.ShapeDtypeStruct],
        cache_shapes: kv_cache.CacheShapes,
        load: Callable[[], list[jax.Array]],
    ) -> None:
        """`load` reads the weights again, from where they came."""
        self._owner, self._load = owner, load
        self._leaf_shapes, self._cache_shapes = list(leaf_shapes), cache_shapes
        self._kept: list[np.ndarray] | None = None

    def drop_weights(self, keep: bool) -> None:
        """Free the weights; with `keep` the host keeps them."""
        # A copy: where the device is the host, a view would keep the device's memory.
        self._kept = [np.array(leaf) for leaf in self._owner.leaves] if keep else None
        _delete(self._owner.leaves)

    def drop_cache(self) -> None:
        _delete(self._owner.kv_cache)

    def restore_weights(self) -> None:
        if self._kept is None:
            self._owner.leaves = self._load()
            return
        self._owner.leaves = [
            jax.device_put(kept, leaf.sharding)
            for kept, leaf in zip(self._kept, self._leaf_shapes, strict=True)
        ]
        self._kept = None

    def restore_cache(self) -> None:
        """An empty one."""
        self._owner.kv_cache = kv_cache.allocate(self._cache_shapes)


def _delete(arrays: object) -> None:
    for array in jax.tree.leaves(arrays):
        array.delete()
