"""The decoder as pure functions of flat leaves, which is what `jax.jit` dispatches fastest."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from jaxinfer.models.batch import RaggedBatch
from jaxinfer.models.cache_groups import CacheGroups
from jaxinfer.models.cache_spec import CacheArray, LayerCache, layer_caches
from jaxinfer.models.decoder import Decoder, Head, KVCache, logits_of
from jaxinfer.models.lora import AdapterStacks
from jaxinfer.models.sharded_dims import ShardedDims
from jaxinfer.models.spec import DecoderSpec
from jaxinfer.models.state_modules import state_shapes
from jaxinfer.models.stored_weight import StoredWeight, store_leaf, stored_weight
from jaxinfer.parallel.mesh import LogicalAxes, named_sharding, tensor_parallel_size
from jaxinfer.weights.plan import LeafPath
from jaxinfer.weights.quantization.layout import StoredLayout


@dataclass(frozen=True, slots=True)
class LeafRole:
    """See `layers.leaf`."""

    axes: LogicalAxes
    num_in_axes: int
    grouped: bool


@dataclass(frozen=True)
class FlatModule[M: nnx.Module]:
    """A module without its weights. `leaves` gives shape, dtype and sharding of each leaf by its path, in the order in
    which `bind` takes them, `roles` what they are to the module."""

    graphdef: nnx.GraphDef[M]
    treedef: jax.tree_util.PyTreeDef
    leaves: dict[LeafPath, jax.ShapeDtypeStruct]
    roles: dict[LeafPath, LeafRole]

    @classmethod
    def create(cls, make: Callable[[], M], mesh: Mesh) -> FlatModule[M]:
        """Builds the module tree for `mesh` without allocating anything."""
        graphdef, state = nnx.split(nnx.eval_shape(make))
        params = {tuple(map(str, path)): param for path, param in nnx.to_flat_state(state)}
        leaves = {
            path: jax.ShapeDtypeStruct(
                param.shape, param.dtype, sharding=named_sharding(mesh, param.logical_axes)
            )
            for path, param in params.items()
        }
        roles = {
            path: LeafRole(param.logical_axes, param.num_in_axes, param.grouped)
            for path, param in params.items()
        }
        return cls(graphdef, jax.tree.structure(state), leaves, roles)

    @cached_property
    def places(self) -> dict[str, list[tuple[int, LeafPath]]]:
        """Where among the leaves those are that begin with a name."""
        found: dict[str, list[tuple[int, LeafPath]]] = {}
        for i, path in enumerate(self.leaves):
            found.setdefault(path[0], []).append((i, path))
        return found

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
    caches: tuple[LayerCache, ...]
    """What each layer keeps."""
    groups: CacheGroups
    """Which layers share their arrays."""
    layouts: Mapping[LeafPath, StoredLayout] = field(default_factory=dict)
    """Of the leaves that are kept as the checkpoint has them. In place of each of these `leaves` has its arrays."""

    @classmethod
    def create(
        cls,
        spec: DecoderSpec,
        mesh: Mesh,
        dtype: jnp.dtype | str,
        kv_dtype: jnp.dtype | str | None = None,
        groups: CacheGroups | None = None,
        *,
        expert_parallel: bool = False,
        layouts: Mapping[LeafPath, StoredLayout] | None = None,
    ) -> FunctionalDecoder:
        """Builds the module tree for `mesh` without allocating anything. `kv_dtype`: the cache's, None for `dtype`;
        `groups`: None gives each layer arrays of its own; `expert_parallel`: the devices share the experts of a mixture,
        and not each expert's MLP rows."""
        dims = ShardedDims.create(spec, tensor_parallel_size(mesh), expert_parallel=expert_parallel)
        dtype = jnp.dtype(dtype)
        kv_dtype = jnp.dtype(kv_dtype or dtype)
        groups = groups or CacheGroups.single(len(spec.attentions))
        layouts = layouts or {}

        def make() -> Decoder:
            decoder = Decoder(spec, dims, mesh, dtype, kv_dtype, groups)
            for path, layout in layouts.items():
                store_leaf(decoder, path, layout, mesh, dtype)
            return decoder

        module = FlatModule.create(make, mesh)
        caches = layer_caches(spec, dims, kv_dtype)
        return cls(spec, dims, mesh, dtype, kv_dtype, module, caches, groups, layouts)

    def with_layouts(self, layouts: Mapping[LeafPath, StoredLayout]) -> FunctionalDecoder:
        """The same decoder with these leaves kept as their checkpoint has them."""
        if not layouts:
            return self
        return FunctionalDecoder.create(
            self.spec,
            self.mesh,
            self.dtype,
            self.kv_dtype,
            self.groups,
            expert_parallel=self.dims.expert_parallel,
            layouts=layouts,
        )

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
        adapters: AdapterStacks | None = None,
    ) -> tuple[jax.Array, tuple[jax.Array, ...], KVCache]:
        """`forward`, and in the middle the residual stream [T, E] that enters each of `layers`. `adapters`: those that
        the batch's `adapter_slots` name."""
        streams: dict[int, jax.Array] = {}
        hidden, kv_cache = self.module.bind(leaves)(batch, kv_cache, streams, adapters)
        return hidden, tuple(streams[layer] for layer in layers), kv_cache

    def head(self, leaves: Sequence[jax.Array]) -> Head:
        """The leaves that `logits` needs."""
        head = self.embedding(leaves) if self.spec.tied_head else self._leaf(leaves, "lm_head")
        return (head, self._leaf(leaves, "head_bias")) if self.spec.head_bias else head

    def embedding(self, leaves: Sequence[jax.Array]) -> jax.Array | StoredWeight:
        """The leaf [V, E] of the tokens' embeddings."""
        return self._leaf(leaves, "embed")

    def _leaf(self, leaves: Sequence[jax.Array], name: str) -> jax.Array | StoredWeight:
        places = self.module.places[name]
        layout = self.layouts.get((name,))
        if layout is None:
            return leaves[places[0][0]]
        arrays: list[dict[str, jax.Array]] = [{} for _ in layout.parts]
        for i, (_, _, part, array) in places:
            arrays[int(part)][array] = leaves[i]
        return stored_weight(layout, ("vocab", "embed"), self.mesh, self.dtype, arrays)

    def logits(self, head: Head, hidden_ne: jax.Array) -> jax.Array:
        """[N, E] -> [N, vocab_size] float32, given the `head` leaves."""
        return logits_of(self.spec, self.mesh, head, hidden_ne)

    def kv_cache_shapes(
        self, num_pages: int, page_size: int, num_slots: int = 0
    ) -> tuple[tuple[jax.ShapeDtypeStruct, ...], ...]:
        """Shape, dtype and sharding of the cache: for each place in a group (see `CacheGroups`) a layer's arrays, mostly
        keys and values, [num_pages, K, page_size, H]; then for each layer with states these, [num_slots, ...]."""

        def pages(array: CacheArray) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(
                (num_pages, *array.page_shape(page_size)),
                array.dtype,
                sharding=named_sharding(self.mesh, (None, *array.axes)),
            )

        largest = max(self.groups.layers, key=len)
        states = [layer.state for layer in self.spec.layers if layer.state is not None]
        embed_dim, mesh, dtype = self.spec.embed_dim, self.mesh, self.dtype
        return (
            *(tuple(map(pages, self.caches[layer].arrays)) for layer in largest),
            *(state_shapes(state, embed_dim, mesh, dtype, num_slots) for state in states),
        )
