"""EAGLE-3 (Li et al. 2025, arXiv 2503.01840): one decoder layer that continues a target's hidden states.

At position t the layer sees the embedding of token t + 1 and a hidden state of position t: the target's, fused from
residual streams of several of its layers, or where the target hasn't been yet, what the layer itself made of position
t - 1. It predicts token t + 2, by a head over its own smaller vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from jaxinfer.models.attention import KV_PAGES_AXES, Attention, KVPages
from jaxinfer.models.batch import RaggedBatch
from jaxinfer.models.decoder import head_logits
from jaxinfer.models.functional import FlatModule
from jaxinfer.models.layers import leaf, linear, rows_of
from jaxinfer.models.mlp import make_mlp
from jaxinfer.models.norms import Norm, add_norm
from jaxinfer.models.rope import rotation
from jaxinfer.models.sharded_dims import ShardedDims, round_up
from jaxinfer.models.spec import DecoderSpec
from jaxinfer.models.stored_weight import StoredWeight
from jaxinfer.parallel.mesh import named_sharding, tensor_parallel_size
from jaxinfer.weights.plan import LeafPath


@dataclass(frozen=True, slots=True)
class Eagle3Spec:
    layer: DecoderSpec
    """The one layer and the head; its vocabulary is the drafter's own."""
    target_vocab_size: int
    target_dim: int
    """Width of the target's residual streams."""
    stream_layers: tuple[int, ...]
    """The target's layers whose entering streams are fused, the lowest first."""
    own_embedding: bool
    """The checkpoint brings an embedding; otherwise the target's serves."""
    maps_vocabulary: bool
    """Draft token i is the target's token i + `d2t[i]`; otherwise both are the same."""
    norm_before_residual: bool = False
    """The residual is the normed hidden state."""


class Eagle3(nnx.Module):
    def __init__(self, spec: Eagle3Spec, dims: ShardedDims, mesh: Mesh, dtype: jnp.dtype):
        layer = spec.layer
        E, fused = layer.embed_dim, len(spec.stream_layers) * spec.target_dim

        def norm() -> nnx.Param:
            return leaf((E,), ("embed",), dtype)

        self.spec, self.mesh = spec, mesh
        self.fuse_streams = leaf((E, fused), ("embed", None), dtype)
        self.embedding_norm = norm()
        self.hidden_norm = norm()
        (block,) = layer.layers
        self.attention = Attention(block.attention, E, mesh, dtype, dtype, input_dim=2 * E)
        self.mlp_norm = norm()
        self.mlp = make_mlp(block.mlp, E, mesh, dtype)
        self.norm = norm()
        self.lm_head = leaf((dims.vocab_size, E), ("vocab", "embed"), dtype)
        if spec.own_embedding:
            rows = round_up(spec.target_vocab_size, dims.tensor_parallel_size)
            self.embed = leaf((rows, E), ("vocab", "embed"), dtype)
        if spec.maps_vocabulary:
            self.d2t = leaf((layer.vocab_size,), (None,), jnp.dtype(jnp.int32))

    def fuse(self, streams: Sequence[jax.Array]) -> jax.Array:
        """The target's streams [T, target_dim] to the hidden states [T, E] that the layer takes."""
        fused = linear(jnp.concatenate(streams, axis=1), self.fuse_streams[...])
        return fused.astype(self.fuse_streams[...].dtype)

    def __call__(
        self,
        target_embed: jax.Array | StoredWeight,
        hidden_te: jax.Array,
        kv_pages: KVPages,
        batch: RaggedBatch,
    ) -> tuple[jax.Array, jax.Array, KVPages]:
        """What the head takes, the hidden states that the next positions take, and the pages.

        Args:
            target_embed: the target's embedding, [V, E].
            batch: its `token_ids` are those that follow the positions.
        """
        spec, layer = self.spec, self.spec.layer
        embed = self.embed[...] if spec.own_embedding else target_embed
        x_te = rows_of(embed, batch.token_ids).astype(hidden_te.dtype)
        normed = [
            Norm(layer.norm, weight[...])(x).astype(hidden_te.dtype)
            for x, weight in ((x_te, self.embedding_norm), (hidden_te, self.hidden_norm))
        ]
        residual = normed[1] if spec.norm_before_residual else hidden_te
        rope = rotation(layer.layers[0].attention.rope, batch.positions)
        update, kv_pages = self.attention(jnp.concatenate(normed, axis=1), kv_pages, batch, rope)
        mlp_norm, norm = (Norm(layer.norm, w[...]) for w in (self.mlp_norm, self.norm))
        x_te, h_te = add_norm(self.mesh, residual, update, None, mlp_norm)
        x_te, h_te = add_norm(self.mesh, x_te, self.mlp(h_te), None, norm)
        return h_te, x_te, kv_pages

    def compute_logits(self, hidden_ne: jax.Array) -> jax.Array:
        """[N, E] -> [N, draft vocabulary] float32."""
        return head_logits(self.mesh, self.lm_head[...], hidden_ne, self.spec.layer.vocab_size)

    def target_ids(self) -> jax.Array:
        """The target's token for each of the drafter's, [draft vocabulary] int32."""
        ids = jnp.arange(self.spec.layer.vocab_size, dtype=jnp.int32)
        return ids + self.d2t[...] if self.spec.maps_vocabulary else ids


@dataclass(frozen=True)
class FunctionalEagle3:
    """The drafter without its weights, as `FunctionalDecoder` is for its target."""

    spec: Eagle3Spec
    dims: ShardedDims
    mesh: Mesh
    dtype: jnp.dtype
    module: FlatModule[Eagle3]

    @classmethod
    def create(cls, spec: Eagle3Spec, mesh: Mesh, dtype: jnp.dtype | str) -> FunctionalEagle3:
        dims = ShardedDims.create(spec.layer, tensor_parallel_size(mesh))
        dtype = jnp.dtype(dtype)
        module = FlatModule.create(lambda: Eagle3(spec, dims, mesh, dtype), mesh)
        return cls(spec, dims, mesh, dtype, module)

    @property
    def leaves(self) -> dict[LeafPath, jax.ShapeDtypeStruct]:
        return self.module.leaves

    def kv_cache_shapes(
        self, num_pages: int, page_size: int
    ) -> tuple[tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct], ...]:
        """Keys and values of the one layer, [num_pages, K, page_size, H] each."""
        attention = self.spec.layer.layers[0].attention
        num_heads = self.dims.heads(attention).num_kv_heads
        shape = (num_pages, num_heads, page_size, attention.head_dim)
        sharding = named_sharding(self.mesh, KV_PAGES_AXES)
        pages = jax.ShapeDtypeStruct(shape, self.dtype, sharding=sharding)
        return ((pages, pages),)
