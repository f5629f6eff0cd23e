"""What each layer keeps of the tokens that it has seen, for those that are still to come.

No JAX here: whoever allots memory reads this, whatever the layer does with it.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import numpy as np

from jaxinfer.models.latent_spec import LatentAttentionSpec
from jaxinfer.models.sharded_dims import ShardedDims
from jaxinfer.models.spec import AnyAttentionSpec, DecoderSpec

PAGE_SIZE = -1
"""Stands in a shape for the tokens of a page."""

KV_PAGE_AXES = ("kv_heads", None, None)


@dataclass(frozen=True, slots=True)
class CacheArray:
    """One array of a layer's cache: shape and logical axes of one page, to which the axis that counts pages is added in
    front."""

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    dtype: np.dtype

    def page_shape(self, page_size: int) -> tuple[int, ...]:
        return tuple(page_size if size == PAGE_SIZE else size for size in self.shape)

    @property
    def token_bytes(self) -> int:
        """Of one token, on all devices together."""
        return prod(self.page_shape(1)) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class LayerCache:
    """The arrays of one layer's cache. With a `window`, no token looks back at more than the `window` - 1 tokens before
    it; None: at all of them."""

    arrays: tuple[CacheArray, ...]
    window: int | None = None

    @property
    def token_bytes(self) -> int:
        return sum(array.token_bytes for array in self.arrays)


def layer_caches(
    spec: DecoderSpec, dims: ShardedDims, kv_dtype: np.dtype
) -> tuple[LayerCache, ...]:
    """Of each layer with attention: keys and values, heads-major, or latents."""

    def kept(attention: AnyAttentionSpec) -> LayerCache:
        if isinstance(attention, LatentAttentionSpec):
            pages = CacheArray((PAGE_SIZE, attention.cache_dim), (None, None), kv_dtype)
            return LayerCache((pages,))
        num_heads = dims.heads(attention).num_kv_heads
        pages = CacheArray((num_heads, PAGE_SIZE, attention.head_dim), KV_PAGE_AXES, kv_dtype)
        return LayerCache((pages, pages), attention.sliding_window)

    return tuple(map(kept, spec.attentions))
