"""The encoder that all families share, over texts that are padded to one length."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from jaxinfer.models.encoders.spec import EncoderSpec
from jaxinfer.models.layers import leaf, linear, matmul_precision
from jaxinfer.models.mlp import ACTIVATION_FUNCTIONS
from jaxinfer.models.norms import add_norm_leaves, norm_of
from jaxinfer.models.spec import NormSpec

_FAR = -1e30
"""The score of a key that isn't there: finite, so that a text of no tokens gives no NaN."""


class TextBatch(NamedTuple):
    """B texts of up to L tokens; what pads them counts for nothing."""

    token_ids: jax.Array
    """[B, L] int32"""
    lengths: jax.Array
    """[B] int32"""
    second_texts: jax.Array
    """[B] int32, where the second text of a pair begins; L for a single one."""


def layer_norm(spec: EncoderSpec) -> NormSpec:
    return NormSpec("layer", spec.norm_eps, has_bias=True)


class EncoderLayer(nnx.Module):
    def __init__(self, spec: EncoderSpec, dtype: jnp.dtype):
        E, N, H, M = spec.embed_dim, spec.num_heads, spec.head_dim, spec.mlp_dim
        self.spec = spec
        self.qkv = leaf((3, N, H, E), (None, None, None, None), dtype)
        self.qkv_bias = leaf((3, N, H), (None, None, None), dtype)
        self.out = leaf((E, N, H), (None, None, None), dtype)
        self.out_bias = leaf((E,), (None,), dtype)
        self.up = leaf((M, E), (None, None), dtype)
        self.up_bias = leaf((M,), (None,), dtype)
        self.down = leaf((E, M), (None, None), dtype)
        self.down_bias = leaf((E,), (None,), dtype)
        for name in ("attention_norm", "mlp_norm"):
            add_norm_leaves(self, name, layer_norm(spec), (E,), (None,), dtype)

    def __call__(self, x_te: jax.Array, mask_bl: jax.Array) -> jax.Array:
        """[T, E] float32 to the same, where T is B * L."""
        spec, dtype = self.spec, self.qkv[...].dtype
        attention_norm, mlp_norm = (
            norm_of(self, name, layer_norm(spec)) for name in ("attention_norm", "mlp_norm")
        )
        x_te = attention_norm(x_te + self._attention(x_te.astype(dtype), mask_bl))
        h_tm = linear(x_te.astype(dtype), self.up[...]) + self.up_bias[...].astype(jnp.float32)
        h_tm = ACTIVATION_FUNCTIONS[spec.activation](h_tm).astype(dtype)
        update = linear(h_tm, self.down[...]) + self.down_bias[...].astype(jnp.float32)
        return mlp_norm(x_te + update)

    def _attention(self, x_te: jax.Array, mask_bl: jax.Array) -> jax.Array:
        """Every token sees all of its text."""
        B, L = mask_bl.shape
        dtype = x_te.dtype
        qkv = linear(x_te, self.qkv[...]) + self.qkv_bias[...].astype(jnp.float32)
        qkv = qkv.astype(dtype).reshape(B, L, *qkv.shape[1:])
        q, k, v = (jnp.moveaxis(qkv[:, :, i], 2, 1) for i in range(3))
        dot = partial(
            jnp.einsum,
            precision=matmul_precision(dtype),
            preferred_element_type=jnp.float32,
        )
        scores = dot("bnqh,bnkh->bnqk", q, k) * self.spec.head_dim**-0.5
        weights = jax.nn.softmax(jnp.where(mask_bl[:, None, None], scores, _FAR), axis=-1)
        mixed = dot("bnqk,bnkh->bnqh", weights.astype(dtype), v).astype(dtype)
        mixed = jnp.moveaxis(mixed, 1, 2).reshape(B * L, *mixed.shape[1:2], mixed.shape[-1])
        return linear(mixed, self.out[...], num_in_axes=2) + self.out_bias[...].astype(jnp.float32)


@partial(jax.jit, static_argnums=0)
def _run_layer(
    graphdef: nnx.GraphDef[EncoderLayer], state: nnx.State, x_te: jax.Array, mask_bl: jax.Array
) -> jax.Array:
    """A function of its own: equal layers are traced and lowered once."""
    return nnx.merge(graphdef, state)(x_te, mask_bl)


class Encoder(nnx.Module):
    """Leaves are zeros until a checkpoint fills them."""

    def __init__(self, spec: EncoderSpec, dtype: jnp.dtype):
        E = spec.embed_dim
        self.spec = spec
        self.embed = leaf((spec.vocab_size, E), (None, None), dtype)
        self.position_embed = leaf((spec.num_positions, E), (None, None), dtype)
        if spec.num_types:
            self.type_embed = leaf((spec.num_types, E), (None, None), dtype)
        add_norm_leaves(self, "embed_norm", layer_norm(spec), (E,), (None,), dtype)
        self.layers = nnx.List(EncoderLayer(spec, dtype) for _ in range(spec.num_layers))
        if spec.head is not None:
            if spec.head.dense is not None:
                self.dense = leaf((E, E), (None, None), dtype)
                self.dense_bias = leaf((E,), (None,), dtype)
            self.classes = leaf((spec.head.num_classes, E), (None, None), dtype)
            self.classes_bias = leaf((spec.head.num_classes,), (None,), dtype)

    def __call__(self, batch: TextBatch) -> jax.Array:
        """Hidden states [B, L, E] float32."""
        B, L = batch.token_ids.shape
        places = jnp.arange(L)
        x = self.embed[...][batch.token_ids].astype(jnp.float32)
        x += self.position_embed[...][places + self.spec.first_position].astype(jnp.float32)
        if self.spec.num_types:
            types = jnp.minimum(places >= batch.second_texts[:, None], self.spec.num_types - 1)
            x += self.type_embed[...][types.astype(jnp.int32)].astype(jnp.float32)
        x_te = norm_of(self, "embed_norm", layer_norm(self.spec))(x).reshape(B * L, -1)
        mask_bl = places < batch.lengths[:, None]
        for layer in self.layers:
            x_te = _run_layer(*nnx.split(layer), x_te, mask_bl)
        return x_te.reshape(B, L, -1)

    def classify(self, x_ne: jax.Array) -> jax.Array:
        """[N, E] to logits [N, C] in float32."""
        head = self.spec.head
        assert head is not None
        if head.dense is not None:
            dense, bias = self.dense[...], self.dense_bias[...].astype(jnp.float32)
            activation = jnp.tanh if head.dense == "tanh" else jax.nn.relu
            x_ne = activation(linear(x_ne.astype(dense.dtype), dense) + bias)
        classes = self.classes[...]
        logits = linear(x_ne.astype(classes.dtype), classes)
        return logits + self.classes_bias[...].astype(jnp.float32)
