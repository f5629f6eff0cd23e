"""The decoder that all families share, driven by a `DecoderSpec`."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from jaxinfer.models.attention import Attention, KVPages
from jaxinfer.models.batch import RaggedBatch
from jaxinfer.models.cache_groups import CacheGroups
from jaxinfer.models.latent_attention import LatentAttention, LatentPages
from jaxinfer.models.latent_spec import LatentAttentionSpec
from jaxinfer.models.layers import constrain, leaf, linear, rows_of, scaled
from jaxinfer.models.lora import AdapterStacks, LayerAdapters
from jaxinfer.models.mlp import make_mlp
from jaxinfer.models.moe import MoeMlp
from jaxinfer.models.moe_spec import MoeSpec
from jaxinfer.models.norms import Norm, add_norm, add_norm_leaves, norm_of, sum_of_parts
from jaxinfer.models.rope import Rotation, no_rotation, rotation
from jaxinfer.models.sharded_dims import ShardedDims
from jaxinfer.models.spec import (
    DecoderSpec,
    LayerSpec,
    LearnedPositions,
    NormSpec,
    RopeSpec,
)
from jaxinfer.models.state_layers import States
from jaxinfer.models.state_modules import make_state_layer
from jaxinfer.models.stored_weight import StoredWeight

LayerPages = KVPages | LatentPages

KVCache = tuple[tuple[jax.Array, ...], ...]
"""What each layer with attention keeps of every token, or with several groups of such layers one per place in a group; then
the states of each layer that has some."""

PagesAndStates = tuple[LayerPages | None, States | None]
"""What one layer has of both."""

Head = jax.Array | StoredWeight | tuple[jax.Array | StoredWeight, jax.Array]
"""[V, E], with a bias [V] where the model has one."""


class DecoderLayer(nnx.Module):
    def __init__(
        self,
        spec: LayerSpec,
        norm: NormSpec,
        embed_dim: int,
        mesh: Mesh,
        dtype: jnp.dtype,
        kv_dtype: jnp.dtype,
        *,
        expert_parallel: bool = False,
    ):
        self.spec, self.norm, self.mesh = spec, norm, mesh
        for name in spec.norm_names:
            add_norm_leaves(self, name, norm, (embed_dim,), ("embed",), dtype)
        if isinstance(spec.attention, LatentAttentionSpec):
            self.attention = LatentAttention(spec.attention, embed_dim, mesh, dtype)
        elif spec.attention is not None:
            self.attention = Attention(spec.attention, embed_dim, mesh, dtype, kv_dtype)
        if spec.state is not None:
            self.state = make_state_layer(spec.state, embed_dim, mesh, dtype)
        if isinstance(spec.mlp, MoeSpec):
            self.mlp = MoeMlp(spec.mlp, embed_dim, mesh, dtype, expert_parallel=expert_parallel)
        elif spec.mlp is not None:
            self.mlp = make_mlp(spec.mlp, embed_dim, mesh, dtype)

    def norm_named(self, name: str) -> Norm | None:
        """None where the layer has no such norm."""
        return norm_of(self, name, self.norm) if name in self.spec.norm_names else None

    def __call__(
        self,
        x_te: jax.Array,
        h_te: jax.Array,
        next_norm: Norm | None,
        cache: PagesAndStates,
        batch: RaggedBatch,
        rope: Rotation,
        adapters: LayerAdapters | None = None,
    ) -> tuple[jax.Array, jax.Array, PagesAndStates]:
        """The residual stream, its norm for whoever comes next, and the cache.

        Args:
            h_te: `x_te` after the layer's first norm. Each addition and the norm that follows it are one operation, so
                that a layer ends with the next one's first norm.
        """
        add = partial(add_norm, self.mesh)
        attention_post, mlp_pre, mlp_post = map(
            self.norm_named, ("attention_post_norm", "mlp_norm", "mlp_post_norm")
        )
        update, cache = self._mixed(h_te, cache, batch, rope, adapters)
        mlp = partial(self._mlp, batch=batch, adapters=adapters)
        match self.spec.norms:
            case _ if update is None:
                x_te, h_te = add(x_te, *self._scaled(mlp(h_te), mlp_post), next_norm)
            case _ if self.spec.mlp is None:
                x_te, h_te = add(x_te, *self._scaled(update, attention_post), next_norm)
            case "parallel" | "parallel_shared":
                mlp_input = h_te if mlp_pre is None else mlp_pre(x_te).astype(x_te.dtype)
                update = sum_of_parts(update) + sum_of_parts(mlp(mlp_input))
                x_te, h_te = add(x_te, *self._scaled(update), next_norm)
            case "sum":
                _, x_te = add(x_te, *self._scaled(update), attention_post)
                _, x_te = add(x_te, *self._scaled(mlp(x_te)), mlp_post)
                h_te = x_te if next_norm is None else next_norm(x_te).astype(x_te.dtype)
            case _:
                x_te, h_te = add(x_te, *self._scaled(update, attention_post), mlp_pre)
                x_te, h_te = add(x_te, *self._scaled(mlp(h_te), mlp_post), next_norm)
        return x_te, h_te, cache

    def _mixed(
        self,
        h_te: jax.Array,
        cache: PagesAndStates,
        batch: RaggedBatch,
        rope: Rotation,
        adapters: LayerAdapters | None,
    ) -> tuple[jax.Array | None, PagesAndStates]:
        """What the tokens learn of others, by attention and from states; [T, E] or [S, T, E] partial sums."""
        kv_pages, states = cache
        updates = []
        if self.spec.attention is not None:
            if isinstance(self.attention, LatentAttention):
                update, kv_pages = self.attention(h_te, kv_pages, batch, rope)
            else:
                own = adapters and adapters.of_module("attention")
                update, kv_pages = self.attention(h_te, kv_pages, batch, rope, own)
            updates.append(update)
        if self.spec.state is not None:
            update, states = self.state(h_te, states, batch)
            updates.append(update)
        if len(updates) < 2:
            return updates[0] if updates else None, (kv_pages, states)
        return sum(map(sum_of_parts, updates)), (kv_pages, states)

    def _mlp(
        self, x_te: jax.Array, batch: RaggedBatch, adapters: LayerAdapters | None
    ) -> jax.Array:
        """[T, E] -> [T, E], or [S, T, E] partial sums."""
        if isinstance(self.mlp, MoeMlp):
            return self.mlp(x_te, batch.query_start_loc[-1])
        return self.mlp(x_te, adapters and adapters.of_module("mlp"))

    def _scaled(self, update: jax.Array, norm: Norm | None = None) -> tuple[jax.Array, Norm | None]:
        """What joins the stream, and the norm that remains to be done before it does."""
        factor = self.spec.residual_scale
        if factor == 1 or norm is None:
            return scaled(update, factor), norm
        return scaled(norm(sum_of_parts(update)), factor), None


@partial(jax.jit, static_argnums=0)
def _run_layer(
    graphdef: nnx.GraphDef[DecoderLayer],
    state: nnx.State,
    x_te: jax.Array,
    h_te: jax.Array,
    next_norm: Norm | None,
    cache: PagesAndStates,
    batch: RaggedBatch,
    rope: Rotation,
    adapters: LayerAdapters | None,
) -> tuple[jax.Array, jax.Array, PagesAndStates]:
    """One layer as a function of its own: layers with equal graphdefs are traced and lowered once per step."""
    return nnx.merge(graphdef, state)(x_te, h_te, next_norm, cache, batch, rope, adapters)


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
        self.embed = leaf((V, E), ("vocab", "embed"), dtype, num_in_axes=1)
        if isinstance(spec.positions, LearnedPositions):
            self.position_embed = leaf((spec.positions.num_rows, E), (None, "embed"), dtype)
        if spec.embed_norm:
            add_norm_leaves(self, "embed_norm", spec.norm, (E,), ("embed",), dtype)
        self.layers = nnx.List(
            DecoderLayer(
                layer,
                spec.norm,
                E,
                mesh,
                dtype,
                kv_dtype,
                expert_parallel=dims.expert_parallel,
            )
            for layer in spec.layers
        )
        if spec.final_norm:
            add_norm_leaves(self, "norm", spec.norm, (E,), ("embed",), dtype)
        if not spec.tied_head:
            self.lm_head = leaf((V, E), ("vocab", "embed"), dtype, num_in_axes=1)
        if spec.head_bias:
            self.head_bias = leaf((V,), ("vocab",), dtype)

    def __call__(
        self,
        batch: RaggedBatch,
        kv_cache: KVCache,
        streams: dict[int, jax.Array] | None = None,
        adapters: AdapterStacks | None = None,
    ) -> tuple[jax.Array, KVCache]:
        """The hidden states [T, E] after the final norm, and the cache with the batch's keys and values.

        `streams`, where given, receives by layer the residual stream [T, E] that enters it. `adapters` are those that the
        batch's `adapter_slots` name.
        """
        x_te = self._embedded(batch)
        rope_keys = [_rotation_key(layer) for layer in self.spec.layers]
        ropes = {key: _rotation(*key, batch.positions) for key in set(rope_keys)}
        # The norm before each layer, and the one after the last.
        norms = [layer.norm_named(layer.spec.first_norm) for layer in self.layers]
        norms.append(norm_of(self, "norm", self.spec.norm) if self.spec.final_norm else None)
        h_te = x_te if norms[0] is None else norms[0](x_te).astype(x_te.dtype)
        pages, states = list(kv_cache[: self.groups.size]), list(kv_cache[self.groups.size :])
        batches = [batch.of_group(group) for group in range(len(self.groups))]
        places, orders = iter(self.groups.places()), iter(range(len(states)))
        for i, layer in enumerate(self.spec.layers):
            if streams is not None:
                streams[i] = x_te
            group, place = (0, None) if layer.attention is None else next(places)
            order = None if layer.state is None else next(orders)
            graphdef, leaves = nnx.split(self.layers[i])
            x_te, h_te, cache = _run_layer(
                graphdef,
                leaves,
                x_te,
                h_te,
                norms[i + 1],
                (
                    None if place is None else pages[place],
                    None if order is None else states[order],
                ),
                batches[group],
                ropes[rope_keys[i]],
                None if adapters is None else LayerAdapters(adapters[i], batch.adapter_slots),
            )
            if place is not None:
                pages[place] = cache[0]
            if order is not None:
                states[order] = cache[1]
        # Without a use of the stream JAX would lower the last layer apart from its equals, without that result.
        return jax.lax.optimization_barrier((h_te, x_te))[0], (*pages, *states)

    def _embedded(self, batch: RaggedBatch) -> jax.Array:
        """[T, E], what enters the first layer."""
        spec = self.spec
        x_te = rows_of(self.embed[...], batch.token_ids)
        x_te = constrain(x_te, self.mesh, (None, "embed"))
        if spec.embed_scale is not None:
            x_te = x_te * jnp.asarray(spec.embed_scale, x_te.dtype)
        if spec.positions is not None:
            rows = batch.positions + spec.positions.offset
            if isinstance(spec.positions, LearnedPositions):
                place_te = self.position_embed[...].at[rows].get(mode="clip")
            else:
                frequencies = np.asarray(spec.positions.frequencies, np.float32)
                angles = rows[:, None].astype(jnp.float32) * frequencies
                place_te = jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=1)
            x_te = x_te + place_te.astype(x_te.dtype)
        if spec.embed_norm:
            x_te = norm_of(self, "embed_norm", spec.norm)(x_te).astype(x_te.dtype)
        return x_te


def _rotation_key(layer: LayerSpec) -> tuple[RopeSpec | None, int]:
    """Of what the rotation depends on."""
    attention = layer.attention
    if attention is None or attention.rope is not None:
        return None if attention is None else attention.rope, 0
    return None, attention.head_dim


def _rotation(rope: RopeSpec | None, head_dim: int, positions: jax.Array) -> Rotation:
    return no_rotation(len(positions), head_dim) if rope is None else rotation(rope, positions)


def logits_of(spec: DecoderSpec, mesh: Mesh, head: Head, hidden_ne: jax.Array) -> jax.Array:
    """[N, E] -> [N, vocab_size] float32, padding rows of the head cut off."""
    head_ve, bias = head if isinstance(head, tuple) else (head, None)
    logits = head_logits(mesh, head_ve, hidden_ne, spec.vocab_size)
    if bias is not None:
        logits += bias[: spec.vocab_size].astype(jnp.float32)
    if spec.logit_scale is not None:
        logits *= spec.logit_scale
    if spec.logit_soft_cap is None:
        return logits
    return spec.logit_soft_cap * jnp.tanh(logits / spec.logit_soft_cap)


def head_logits(
    mesh: Mesh, head_ve: jax.Array | StoredWeight, hidden_ne: jax.Array, vocab_size: int
) -> jax.Array:
    """[V, E] and [N, E] -> [N, vocab_size] float32: the products with the head's first rows."""
    # Without the first constraint the second one would make every device gather the head and compute all of it.
    logits = constrain(linear(hidden_ne, head_ve), mesh, (None, "vocab"))
    return constrain(logits, mesh, (None, None))[:, :vocab_size]
