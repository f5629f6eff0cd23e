"""Layers that take their pages together.

A page has a number, and the number stands for one page in each layer of a group. Layers that look back at all tokens and
layers with a window are in different groups, so that the pages that fell out of a window can be given back while others
are kept. As all groups have the same number of layers (the last one of a kind may have fewer), they share their arrays:
the first layers of all groups one array, the second layers another. So every page can serve any group.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from jaxinfer.models.cache_spec import LayerCache, layer_caches
from jaxinfer.models.sharded_dims import ShardedDims
from jaxinfer.models.spec import DecoderSpec

MAX_GROUPS = 8
"""Each group's block tables go to the device in every step."""

_WINDOWS_OF_CONTEXT = 8
"""The context that a choice of groups is judged by, in windows: what is kept of it costs memory, and so does a place that
no layer fills."""


@dataclass(frozen=True, slots=True)
class CacheGroups:
    """`layers[g]` are those of group g, counted among the layers with attention, which looks back by `windows[g]` (None: at all tokens). A group of layers without
    a window comes first, and is the only one of its kind."""

    windows: tuple[int | None, ...]
    layers: tuple[tuple[int, ...], ...]

    @classmethod
    def single(cls, num_layers: int, window: int | None = None) -> CacheGroups:
        """All layers with arrays of their own."""
        return cls((window,), (tuple(range(num_layers)),))

    def __len__(self) -> int:
        return len(self.layers)

    @property
    def size(self) -> int:
        """Layers of a group, and so arrays."""
        return max(map(len, self.layers))

    def places(self) -> list[tuple[int, int]]:
        """By layer, its group and its place in it."""
        places = {
            layer: (group, place)
            for group, layers in enumerate(self.layers)
            for place, layer in enumerate(layers)
        }
        return [places[layer] for layer in range(len(places))]


def model_groups(spec: DecoderSpec, max_model_len: int) -> CacheGroups:
    """The groups for requests of at most so many tokens. They don't depend on the mesh, nor on the cache's dtype."""
    caches = layer_caches(spec, ShardedDims.create(spec), np.dtype(np.float32))
    return choose_groups(caches, max_model_len)


def choose_groups(caches: Sequence[LayerCache], max_model_len: int) -> CacheGroups:
    """The groups that take the least memory at a context of some windows, or all layers in one group where that is as
    good, or where their pages differ in size. A window as long as the longest request is none."""
    windows = [
        None if cache.window is None or cache.window >= max_model_len else cache.window
        for cache in caches
    ]
    kinds = sorted(set(windows), key=lambda window: window or 0)
    widest = None if None in kinds else max(kinds, default=None)
    single = CacheGroups.single(len(caches), widest)
    if len(kinds) <= 1 or len({cache.arrays for cache in caches}) > 1:
        return single
    best = min(_candidates(windows, kinds), key=_cost, default=single)
    return best if _cost(best) < _cost(single, max(filter(None, kinds))) else single


def _candidates(
    windows: Sequence[int | None], kinds: Sequence[int | None]
) -> Iterator[CacheGroups]:
    """The largest groups first."""
    of_kind = {kind: [i for i, w in enumerate(windows) if w == kind] for kind in kinds}
    for size in range(max(map(len, of_kind.values())), 0, -1):
        groups = [
            (kind, tuple(layers[first : first + size]))
            for kind, layers in of_kind.items()
            for first in range(0, len(layers), size)
        ]
        if len(groups) <= MAX_GROUPS and len(of_kind.get(None, ())) <= size:
            yield CacheGroups(*zip(*groups, strict=True))


def _cost(groups: CacheGroups, widest: int | None = None) -> int:
    """Tokens kept, over all places. `widest`: the model's widest window, where no group has it."""
    widest = widest or max(filter(None, groups.windows))
    full = _WINDOWS_OF_CONTEXT * widest
    return groups.size * sum(full if w is None else w for w in groups.windows)
