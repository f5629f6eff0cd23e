"""The decoder as pure functions of flat leaves, which is what `jax.jit` dispatches fastest."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from jaxinfer.models.attention import KV_PAGES_AXES
from jaxinfer.models.batch import RaggedBatch
from jaxinfer.models.decoder import Decoder, KVCache, logits_of
from jaxinfer.models.sharded_dims import ShardedDims
from jaxinfer.models.spec import DecoderSpec
from jaxinfer.parallel.mesh import named_sharding, tensor_parallel_size
from jaxinfer.weights.plan import LeafPath


@dataclass(frozen=True)
class FlatModule[M: nnx.Module]:
    """A module without its weights. `leaves` gives shape, dtype and sharding of each leaf by its path, in the order in
    which `bind` takes them."""

    graphdef: nnx.GraphDef[M]
    treedef: jax.tree_util.PyTreeDef
    leaves: dict[LeafPath, jax.ShapeDtypeStruct]

    @classmethod
    def create(cls, make: Callable[[], M], mesh: Mesh) -> FlatModule[M]:
        """Builds the module tree for `mesh` without allocating anything."""
        graphdef, state = nnx.split(nnx.eval_shape(make))
        leaves = {
            tuple(map(str, path)): jax.ShapeDtypeStruct(
                param.shape, param.dtype, sharding=named_sharding(mesh, param.logical_axes)
            )
            for path, param in nnx.to_flat_state(state)
        }
        return cls(graphdef, jax.tree.structure(state), leaves)

    def bind(self, leaves: Sequence[jax.Array]) -> M:
        return nnx.merge(self.graphdef, self.treedef.unflatten(leaves))


@dataclass(frozen=True)
class FunctionalDecoder:
    """A decoder without its weights: what they must be, and what to do with them."""

    spec: DecoderSpec
    dims: ShardedDims
    mesh: Mesh
    dtype: jnp.dtype
    kv_dtype: jnp.dtype
    module: FlatModule[Decoder]

    @classmethod
    def create(
        cls,
        spec: DecoderSpec,
        mesh: Mesh,
        dtype: jnp.dtype | str,
        kv_dtype: jnp.dtype | str | None = None,
    ) -> FunctionalDecoder:
        """Builds the module tree for `mesh` without allocating anything. `kv_dtype`: the cache's, None for `dtype`."""
        dims = ShardedDims.create(spec, tensor_parallel_size(mesh))
        dtype = jnp.dtype(dtype)
        kv_dtype = jnp.dtype(kv_dtype or dtype)
        module = FlatModule.create(lambda: Decoder(spec, dims, mesh, dtype, kv_dtype), mesh)
        return cls(spec, dims, mesh, dtype, kv_dtype, module)

    @property
    def leaves(self) -> dict[LeafPath, jax.ShapeDtypeStruct]:
        """Shape, dtype and sharding of each leaf by its path, in the order in which `forward` takes them."""
        return self.module.leaves

    def forward(
        self, leaves: Sequence[jax.Array], batch: RaggedBatch, kv_cache: KVCache
    ) -> tuple[jax.Array, KVCache]:
        """The hidden states [T, E] after the final norm, and the cache with the batch's keys and values."""
        return self.module.bind(leaves)(batch, kv_cache)

    def forward_with_streams(
        self,
        leaves: Sequence[jax.Array],
        batch: RaggedBatch,
        kv_cache: KVCache,
        layers: Sequence[int],
    ) -> tuple[jax.Array, tuple[jax.Array, ...], KVCache]:
        """`forward`, and in the middle the residual stream [T, E] that enters each of `layers`."""
        streams: dict[int, jax.Array] = {}
        hidden, kv_cache = self.module.bind(leaves)(batch, kv_cache, streams)
        return hidden, tuple(streams[layer] for layer in layers), kv_cache

    def head(self, leaves: Sequence[jax.Array]) -> jax.Array:
        """The leaf that `logits` needs."""
        return self.embedding(leaves) if self.spec.tied_head else self._leaf(leaves, "lm_head")

    def embedding(self, leaves: Sequence[jax.Array]) -> jax.Array:
        """The leaf [V, E] of the tokens' embeddings."""
        return self._leaf(leaves, "embed")

    def _leaf(self, leaves: Sequence[jax.Array], name: str) -> jax.Array:
        return leaves[list(self.leaves).index((name,))]

    def logits(self, head_ve: jax.Array, hidden_ne: jax.Array) -> jax.Array:
        """[N, E] -> [N, vocab_size] float32, given the `head` leaf."""
        return logits_of(self.spec, self.mesh, head_ve, hidden_ne)

    def kv_cache_shapes(
        self, num_pages: int, page_size: int
    ) -> tuple[tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct], ...]:
        """Shape, dtype and sharding of the cache: per layer keys and values, [num_pages, K, page_size, H]."""
        shape = (num_pages, self.dims.num_kv_heads, page_size, self.spec.head_dim)
        sharding = named_sharding(self.mesh, KV_PAGES_AXES)
        pages = jax.ShapeDtypeStruct(shape, self.kv_dtype, sharding=sharding)
        return ((pages, pages),) * len(self.spec.layers)
