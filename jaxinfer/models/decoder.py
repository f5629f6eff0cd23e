"""The decoder that all families share, driven by a `DecoderSpec`."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from jaxinfer.models.attention import Attention, KVPages
from jaxinfer.models.batch import RaggedBatch
from jaxinfer.models.cache_groups import CacheGroups
from jaxinfer.models.layers import GatedMlp, add_rms_norm, constrain, leaf, linear, rms_norm
from jaxinfer.models.rope import Rotation, rotation
from jaxinfer.models.sharded_dims import ShardedDims
from jaxinfer.models.spec import DecoderSpec

KVCache = tuple[KVPages, ...]
"""One pair of pages per layer; with several groups of layers, one per place in a group."""


class DecoderLayer(nnx.Module):
    def __init__(
        self,
        spec: DecoderSpec,
        dims: ShardedDims,
        mesh: Mesh,
        dtype: jnp.dtype,
        kv_dtype: jnp.dtype,
        *,
        sliding_window: int | None,
    ):
        def norm() -> nnx.Param:
            return leaf((spec.embed_dim,), ("embed",), dtype)

        self.spec, self.mesh = spec, mesh
        self.attention_norm = norm()
        self.attention = Attention(spec, dims, mesh, dtype, kv_dtype, sliding_window=sliding_window)
        self.mlp_norm = norm()
        self.mlp = GatedMlp(spec, dims, mesh, dtype)
        if spec.post_norms:
            self.attention_post_norm = norm()
            self.mlp_post_norm = norm()

    def __call__(
        self,
        x_te: jax.Array,
        h_te: jax.Array,
        next_norm: jax.Array,
        kv_pages: KVPages,
        batch: RaggedBatch,
        rope: Rotation,
    ) -> tuple[jax.Array, jax.Array, KVPages]:
        """The residual stream, its norm for whoever comes next (of weight `next_norm`), and the pages.

        Args:
            h_te: `x_te` after `attention_norm`. Each addition and the norm that follows it are one operation, so that a
                layer ends with the next one's first norm.
        """
        norm = partial(add_rms_norm, self.spec, self.mesh)
        post_norms = (None, None)
        if self.spec.post_norms:
            post_norms = self.attention_post_norm[...], self.mlp_post_norm[...]

        update, kv_pages = self.attention(h_te, kv_pages, batch, rope)
        x_te, h_te = norm(x_te, update, self.mlp_norm[...], post_norms[0])
        x_te, h_te = norm(x_te, self.mlp(h_te), next_norm, post_norms[1])
        return x_te, h_te, kv_pages


@partial(jax.jit, static_argnums=0)
def _run_layer(
    graphdef: nnx.GraphDef[DecoderLayer],
    state: nnx.State,
    x_te: jax.Array,
    h_te: jax.Array,
    next_norm: jax.Array,
    kv_pages: KVPages,
    batch: RaggedBatch,
    rope: Rotation,
) -> tuple[jax.Array, jax.Array, KVPages]:
    """One layer as a function of its own: layers with equal graphdefs are traced and lowered once per step."""
    return nnx.merge(graphdef, state)(x_te, h_te, next_norm, kv_pages, batch, rope)


class Decoder(nnx.Module):
    """Token ids to hidden states, hidden states to logits. Leaves are zeros until a checkpoint fills them."""

    def __init__(
        self,
        spec: DecoderSpec,
        dims: ShardedDims,
        mesh: Mesh,
        dtype: jnp.dtype,
        kv_dtype: jnp.dtype,
        groups: CacheGroups,
    ):
        E, V = spec.embed_dim, dims.vocab_size
        self.spec, self.mesh, self.groups = spec, mesh, groups
        self.embed = leaf((V, E), ("vocab", "embed"), dtype)
        self.layers = nnx.List(
            DecoderLayer(spec, dims, mesh, dtype, kv_dtype, sliding_window=layer.sliding_window)
            for layer in spec.layers
        )
        self.norm = leaf((E,), ("embed",), dtype)
        if not spec.tied_head:
            self.lm_head = leaf((V, E), ("vocab", "embed"), dtype)

    def __call__(
        self,
        batch: RaggedBatch,
        kv_cache: KVCache,
        streams: dict[int, jax.Array] | None = None,
    ) -> tuple[jax.Array, KVCache]:
        """The hidden states [T, E] after the final norm, and the cache with the batch's keys and values.

        `streams`, where given, receives by layer the residual stream [T, E] that enters it.
        """
        x_te = self.embed[...].at[batch.token_ids].get(mode="clip")
        x_te = constrain(x_te, self.mesh, (None, "embed"))
        if self.spec.embed_scale is not None:
            x_te = x_te * jnp.asarray(self.spec.embed_scale, x_te.dtype)
        ropes = {
            rope: rotation(rope, batch.positions) for rope in {a.rope for a in self.spec.layers}
        }
        norms = [layer.attention_norm[...] for layer in self.layers] + [self.norm[...]]
        h_te = rms_norm(x_te, norms[0], self.spec).astype(x_te.dtype)
        pages = list(kv_cache)
        batches = [batch.of_group(group) for group in range(len(self.groups))]
        places = self.groups.places()
        for i, (attention, (group, place)) in enumerate(zip(self.spec.layers, places, strict=True)):
            if streams is not None:
                streams[i] = x_te
            graphdef, state = nnx.split(self.layers[i])
            x_te, h_te, pages[place] = _run_layer(
                graphdef,
                state,
                x_te,
                h_te,
                norms[i + 1],
                pages[place],
                batches[group],
                ropes[attention.rope],
            )
        # Without a use of the stream JAX would lower the last layer apart from its equals, without that result.
        return jax.lax.optimization_barrier((h_te, x_te))[0], tuple(pages)

    def compute_logits(self, hidden_ne: jax.Array) -> jax.Array:
        """[N, E] -> [N, vocab_size] float32."""
        head = self.embed if self.spec.tied_head else self.lm_head
        return logits_of(self.spec, self.mesh, head[...], hidden_ne)


def logits_of(spec: DecoderSpec, mesh: Mesh, head_ve: jax.Array, hidden_ne: jax.Array) -> jax.Array:
    """[V, E] and [N, E] -> [N, vocab_size] float32, padding rows of the head cut off."""
    logits = head_logits(mesh, head_ve, hidden_ne, spec.vocab_size)
    if spec.logit_soft_cap is None:
        return logits
    return spec.logit_soft_cap * jnp.tanh(logits / spec.logit_soft_cap)


def head_logits(mesh: Mesh, head_ve: jax.Array, hidden_ne: jax.Array, vocab_size: int) -> jax.Array:
    """[V, E] and [N, E] -> [N, vocab_size] float32: the products with the head's first rows."""
    # Without the first constraint the second one would make every device gather the head and compute all of it.
    logits = constrain(linear(hidden_ne, head_ve), mesh, (None, "vocab"))
    return constrain(logits, mesh, (None, None))[:, :vocab_size]
