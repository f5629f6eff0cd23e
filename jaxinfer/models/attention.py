"""Grouped-query attention over the paged KV cache."""

from __future__ import annotations

from math import prod

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, PartitionSpec

from jaxinfer.models.batch import RaggedBatch
from jaxinfer.models.cache_spec import KV_PAGE_AXES
from jaxinfer.models.layers import constrain, leaf, linear, num_partial_sums, product_dtype
from jaxinfer.models.rope import Rotation
from jaxinfer.models.sharded_dims import ShardedDims
from jaxinfer.models.spec import DecoderSpec
from jaxinfer.parallel.mesh import partition_spec, tensor_parallel_size
from kernels_pallas import (
    ragged_paged_attention,
    rope_kv_cache_update,
    shared_prefix_attention,
)
from kernels_pallas.quantized_pages import quantized

KVPages = tuple[jax.Array, jax.Array]
"""One layer's keys and values, each [num_pages, K, page_size, H]."""

KV_PAGES_AXES = (None, *KV_PAGE_AXES)


class Attention(nnx.Module):
    def __init__(
        self,
        spec: DecoderSpec,
        dims: ShardedDims,
        mesh: Mesh,
        dtype: jnp.dtype,
        kv_dtype: jnp.dtype,
        *,
        sliding_window: int | None,
        input_dim: int | None = None,
    ):
        """`input_dim`: what the layer attends with, where that is not `spec.embed_dim` wide as its result is."""
        E, K, G, H = spec.embed_dim, dims.num_kv_heads, dims.queries_per_kv, spec.head_dim
        self.spec, self.mesh, self.sliding_window = spec, mesh, sliding_window
        self.qkv = leaf((K, G + 2, H, input_dim or E), ("kv_heads", "heads", None, "embed"), dtype)
        self.o = leaf((E, K, G, H), ("embed", "kv_heads", "heads", None), dtype)
        if spec.qkv_bias:
            self.qkv_bias = leaf((K, G + 2, H), ("kv_heads", "heads", None), dtype)
        if spec.o_bias:
            self.o_bias = leaf((E,), ("embed",), dtype)
        if spec.qk_norm:
            self.q_norm = leaf((H,), (None,), dtype)
            self.k_norm = leaf((H,), (None,), dtype)
        if quantized(kv_dtype):
            self.k_scale = leaf((K,), ("kv_heads",), jnp.float32)
            self.v_scale = leaf((K,), ("kv_heads",), jnp.float32)
        self.quantized_cache = quantized(kv_dtype)

    def __call__(
        self, x_te: jax.Array, kv_pages: KVPages, batch: RaggedBatch, rope: Rotation
    ) -> tuple[jax.Array, KVPages]:
        """[T, input_dim] -> [T, E] or [S, T, E] partial sums, and the pages with the batch's keys and values written."""
        dtype = product_dtype(self.mesh, x_te.dtype)
        qkv = linear(x_te, self.qkv[...], dtype)  # [T, K, G+2, H]
        if self.spec.qkv_bias:
            qkv += self.qkv_bias[...].astype(dtype)
        attended, kv_pages = self._attend(qkv, kv_pages, batch, rope, x_te.dtype)
        weight = self.o[...]
        sizes = weight.shape[0], prod(weight.shape[1:])
        parts = 1 if self.spec.o_bias else num_partial_sums(self.mesh, len(x_te), *sizes)
        out = linear(attended, weight, dtype, num_in_axes=3, num_partial_sums=parts)
        out = constrain(out, self.mesh, (None, "embed"))
        if self.spec.o_bias:
            out += self.o_bias[...].astype(dtype)
        return out, kv_pages

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
        norms = (self.q_norm[...], self.k_norm[...]) if spec.qk_norm else (None, None)
        kv_scales = (self.k_scale[...], self.v_scale[...]) if self.quantized_cache else None

        def attend(qkv, kv_pages, batch, rope, norms, kv_scales):
            q_tnh, kv_pages = rope_kv_cache_update(
                qkv,
                kv_pages,
                batch.slot_mapping,
                *rope,
                q_norm=norms[0],
                k_norm=norms[1],
                kv_scales=kv_scales,
                norm_eps=spec.norm_eps,
                norm_weight_offset=spec.norm_weight_offset,
            )
            if self.quantized_cache:
                # Those of a CPU's float32 products are rounded as for a cache of the model's dtype.
                q_tnh = q_tnh.astype(dtype)
            rows = (batch.block_tables, batch.seq_lens, batch.query_start_loc)
            options = {
                "scale": spec.query_scale,
                "kv_scales": kv_scales,
                "decode_only": batch.decode_only,
            }
            # A window leaves each row a piece of the shared pages of its own, or nothing of them.
            if batch.shared_prefixes is None or self.sliding_window is not None:
                attended = ragged_paged_attention(
                    q_tnh,
                    kv_pages,
                    *rows,
                    sliding_window=self.sliding_window,
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
                    partition_spec(("kv_heads",)),
                ),
                out_specs=(heads, (pages, pages)),
                check_vma=False,
            )
        return attend(qkv, kv_pages, batch, rope, norms, kv_scales)
