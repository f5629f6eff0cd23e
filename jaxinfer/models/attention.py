"""Grouped-query attention over the paged KV cache."""

from __future__ import annotations

from math import prod

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, PartitionSpec

from jaxinfer.models.batch import RaggedBatch
from jaxinfer.models.cache_spec import KV_PAGE_AXES
from jaxinfer.models.layers import constrain, leaf, linear, num_partial_sums, product_dtype, scaled
from jaxinfer.models.lora import LayerAdapters, add_updates, has_updates
from jaxinfer.models.norms import add_norm_leaves, norm_of
from jaxinfer.models.rope import Rotation, no_rotation
from jaxinfer.models.sharded_dims import ShardedHeads
from jaxinfer.models.spec import AttentionSpec, QueryTemperature
from jaxinfer.parallel.mesh import partition_spec, tensor_parallel_size
from kernels_pallas import (
    ragged_paged_attention,
    rope_kv_cache_update,
    shared_prefix_attention,
)
from kernels_pallas.quantized_pages import quantized
from kernels_pallas.rope_kv_cache_update.xla import rotate

KVPages = tuple[jax.Array, jax.Array]
"""One layer's keys and values, each [num_pages, K, page_size, H]."""

KV_PAGES_AXES = (None, *KV_PAGE_AXES)


class Attention(nnx.Module):
    def __init__(
        self,
        spec: AttentionSpec,
        embed_dim: int,
        mesh: Mesh,
        dtype: jnp.dtype,
        kv_dtype: jnp.dtype,
        *,
        input_dim: int | None = None,
    ):
        """`input_dim`: what the layer attends with, where that is not `embed_dim` wide as its result is."""
        heads = ShardedHeads.create(spec, tensor_parallel_size(mesh))
        E, K, G, H = embed_dim, heads.num_kv_heads, heads.queries_per_kv, spec.head_dim
        self.spec, self.mesh, self.heads = spec, mesh, heads
        in_axes = ("kv_heads", "heads", None, "embed")
        self.qkv = leaf((K, G + 2, H, input_dim or E), in_axes, dtype, num_in_axes=1)
        out_axes = ("embed", "kv_heads", "heads", None)
        self.o = leaf((E, K, G, H), out_axes, dtype, num_in_axes=3)
        if spec.gated:
            self.gate = leaf((K, G, H, input_dim or E), in_axes, dtype, num_in_axes=1)
        if spec.qkv_bias:
            self.qkv_bias = leaf((K, G + 2, H), ("kv_heads", "heads", None), dtype)
        if spec.o_bias:
            self.o_bias = leaf((E,), ("embed",), dtype)
        if spec.sinks:
            self.sinks = leaf((K, G), ("kv_heads", "heads"), jnp.dtype(jnp.float32))
        if (qk_norm := spec.qk_norm) is not None:
            shared = qk_norm.over == "head"
            for name, shape in (("q_norm", (K, G, H)), ("k_norm", (K, H))):
                axes = (None,) if shared else ("kv_heads", *(None,) * (len(shape) - 1))
                add_norm_leaves(
                    self, name, qk_norm.norm, shape[-1:] if shared else shape, axes, dtype
                )
        if quantized(kv_dtype):
            self.k_scale = leaf((K,), ("kv_heads",), jnp.float32)
            self.v_scale = leaf((K,), ("kv_heads",), jnp.float32)
        self.quantized_cache = quantized(kv_dtype)

    def __call__(
        self,
        x_te: jax.Array,
        kv_pages: KVPages,
        batch: RaggedBatch,
        rope: Rotation,
        adapters: LayerAdapters | None = None,
    ) -> tuple[jax.Array, KVPages]:
        """[T, input_dim] -> [T, E] or [S, T, E] partial sums, and the pages with the batch's keys and values written."""
        attended, kv_pages = self.attended(x_te, kv_pages, batch, rope, adapters)
        return self.project(attended, adapters), kv_pages

    def attended(
        self,
        x_te: jax.Array,
        kv_pages: KVPages,
        batch: RaggedBatch,
        rope: Rotation,
        adapters: LayerAdapters | None = None,
    ) -> tuple[jax.Array, KVPages]:
        """What the output projection takes, [T, K, G, H] in `x_te`'s dtype, and the pages."""
        dtype = product_dtype(self.mesh, x_te.dtype)
        qkv = linear(x_te, self.qkv[...], dtype)  # [T, K, G+2, H]
        qkv = add_updates(qkv, adapters, "qkv", x_te)
        if self.spec.qkv_bias:
            qkv += self.qkv_bias[...].astype(dtype)
        if self.spec.qkv_clip is not None:
            qkv = jnp.clip(qkv, -self.spec.qkv_clip, self.spec.qkv_clip)
        if self.spec.qk_norm is not None and not self._norms_are_fused:
            qkv, rope = self._norm_queries_and_keys(qkv, rope)
        attended, kv_pages = self._attend(qkv, kv_pages, batch, rope, x_te.dtype)
        if self.spec.gated:
            gate = add_updates(linear(x_te, self.gate[...]), adapters, "gate", x_te)
            attended = (attended * jax.nn.sigmoid(gate)).astype(x_te.dtype)  # [T, K, G, H]
        return attended, kv_pages

    def project(self, attended: jax.Array, adapters: LayerAdapters | None = None) -> jax.Array:
        """[T, K, G, H] -> [T, E] or [S, T, E] partial sums."""
        weight, dtype = self.o[...], product_dtype(self.mesh, attended.dtype)
        sizes = weight.shape[0], prod(weight.shape[1:])
        whole = self.spec.o_bias or has_updates(adapters, "o")
        parts = 1 if whole else num_partial_sums(self.mesh, len(attended), *sizes)
        out = linear(attended, weight, dtype, num_in_axes=3, num_partial_sums=parts)
        out = constrain(out, self.mesh, (None, "embed"))
        out = add_updates(out, adapters, "o", attended)
        if self.spec.o_bias:
            out += self.o_bias[...].astype(dtype)
        return scaled(out, self.spec.out_scale)

    @property
    def _norms_are_fused(self) -> bool:
        """Whether `rope_kv_cache_update` can say the norms of queries and keys."""
        spec = self.spec.qk_norm
        return (
            spec is not None
            and (spec.over, spec.after_rope, spec.norm.kind) == ("head", False, "rms")
            and spec.norm.has_weight
            and not spec.norm.has_bias
        )

    def _norm_queries_and_keys(self, qkv: jax.Array, rope: Rotation) -> tuple[jax.Array, Rotation]:
        """[T, K, G+2, H] with normed queries and keys, and the rotation that remains to be done."""
        spec, qk_norm = self.spec, self.spec.qk_norm
        qkv = qkv.astype(jnp.float32)
        q_tkgh, k_tkh, v_tkh = qkv[:, :, :-2], qkv[:, :, -2], qkv[:, :, -1]
        if qk_norm.after_rope:
            q_tkgh, k_tkh = rotate(q_tkgh, *rope), rotate(k_tkh, *rope)
            rope = no_rotation(len(qkv), spec.head_dim)
        q_norm, k_norm = (norm_of(self, name, qk_norm.norm) for name in ("q_norm", "k_norm"))
        if qk_norm.over == "projection":
            # Heads that are padding are zeros, and copies of a key count as often as there are.
            copies = self.heads.kv_replicas
            q_tkgh = q_norm(q_tkgh, 3, spec.num_heads * spec.head_dim)
            k_tkh = k_norm(k_tkh, 2, copies * spec.num_kv_heads * spec.head_dim)
        else:
            q_tkgh, k_tkh = q_norm(q_tkgh), k_norm(k_tkh)
        return jnp.concatenate([q_tkgh, k_tkh[:, :, None], v_tkh[:, :, None]], axis=2), rope

    def _attend(
        self,
        qkv: jax.Array,
        kv_pages: KVPages,
        batch: RaggedBatch,
        rope: Rotation,
        dtype: jnp.dtype,
    ) -> tuple[jax.Array, KVPages]:
        """Writes the keys and values, then attends, each device on its own kv heads: [T, K, G+2, H] -> [T, K, G, H]."""
        spec = self.spec
        norms = None
        norm_options = {}
        if self._norms_are_fused:
            norms = self.q_norm[...], self.k_norm[...]
            norm = spec.qk_norm.norm
            norm_options = {"norm_eps": norm.eps, "norm_weight_offset": norm.weight_offset}
        kv_scales = (self.k_scale[...], self.v_scale[...]) if self.quantized_cache else None
        sinks = self.sinks[...] if spec.sinks else None
        # A window or a slope leaves each row something of its own of the shared pages, or nothing.
        alone = spec.sliding_window is not None or spec.alibi_slopes is not None

        def attend(qkv, kv_pages, batch, rope, norms, kv_scales, sinks, slopes):
            q_norm, k_norm = norms or (None, None)
            q_tnh, kv_pages = rope_kv_cache_update(
                qkv,
                kv_pages,
                batch.slot_mapping,
                *rope,
                q_norm=q_norm,
                k_norm=k_norm,
                kv_scales=kv_scales,
                **norm_options,
            )
            if spec.temperature is not None:
                factor_t = _temperature(spec.temperature, batch.positions)
                q_tnh = (q_tnh.astype(jnp.float32) * factor_t[:, None, None]).astype(q_tnh.dtype)
            if self.quantized_cache:
                # Those of a CPU's float32 products are rounded as for a cache of the model's dtype.
                q_tnh = q_tnh.astype(dtype)
            rows = (batch.block_tables, batch.seq_lens, batch.query_start_loc)
            options = {
                "scale": spec.query_scale,
                "soft_cap": spec.soft_cap,
                "sinks": None if sinks is None else sinks.reshape(-1),
                "kv_scales": kv_scales,
                "decode_only": batch.decode_only,
            }
            if batch.shared_prefixes is None or alone:
                attended = ragged_paged_attention(
                    q_tnh,
                    kv_pages,
                    *rows,
                    sliding_window=spec.sliding_window,
                    alibi_slopes=None if slopes is None else slopes.reshape(-1),
                    batch_invariant=batch.batch_invariant,
                    **options,
                )
            else:
                attended = shared_prefix_attention(
                    q_tnh, kv_pages, *rows, batch.shared_prefixes, **options
                )
            T, K, N, H = qkv.shape
            return attended.reshape(T, K, N - 2, H).astype(dtype), kv_pages

        if tensor_parallel_size(self.mesh) > 1:
            heads = partition_spec((None, "kv_heads", None, None))
            pages = partition_spec(KV_PAGES_AXES)
            by_head = partition_spec(("kv_heads",))
            everywhere = PartitionSpec()
            attend = jax.shard_map(
                attend,
                mesh=self.mesh,
                in_specs=(
                    heads,
                    (pages, pages),
                    everywhere,
                    everywhere,
                    everywhere,
                    by_head,
                    by_head,
                    by_head,
                ),
                out_specs=(heads, (pages, pages)),
                check_vma=False,
            )
        return attend(qkv, kv_pages, batch, rope, norms, kv_scales, sinks, self._slopes())

    def _slopes(self) -> jax.Array | None:
        """[K, G] float32"""
        if self.spec.alibi_slopes is None:
            return None
        slopes = np.asarray(self.spec.alibi_slopes, np.float32)
        return jnp.asarray(self.heads.deal_queries(slopes.reshape(self.spec.num_kv_heads, -1)))


def _temperature(temperature: QueryTemperature, positions: jax.Array) -> jax.Array:
    """[T] float32"""
    periods = jnp.floor((positions + temperature.offset).astype(jnp.float32) / temperature.period)
    return 1 + temperature.scale * jnp.log1p(periods)
