"""Grouped-query attention over the paged KV cache."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, PartitionSpec

from jaxinfer.models.batch import RaggedBatch
from jaxinfer.models.layers import constrain, leaf, linear, rms_norm
from jaxinfer.models.rope import Rotation, rotate
from jaxinfer.models.sharded_dims import ShardedDims
from jaxinfer.models.spec import DecoderSpec
from jaxinfer.parallel.mesh import partition_spec, tensor_parallel_size
from kernels_pallas import kv_cache_update, ragged_paged_attention

KVPages = tuple[jax.Array, jax.Array]
"""One layer's keys and values, each [num_pages, K, page_size, H]."""

KV_PAGES_AXES = (None, "kv_heads", None, None)


class Attention(nnx.Module):
    def __init__(
        self,
        spec: DecoderSpec,
        dims: ShardedDims,
        mesh: Mesh,
        dtype: jnp.dtype,
        *,
        sliding_window: int | None,
    ):
        E, K, G, H = spec.embed_dim, dims.num_kv_heads, dims.queries_per_kv, spec.head_dim
        self.spec, self.mesh, self.sliding_window = spec, mesh, sliding_window
        self.qkv = leaf((K, G + 2, H, E), ("kv_heads", "heads", None, "embed"), dtype)
        self.o = leaf((E, K, G, H), ("embed", "kv_heads", "heads", None), dtype)
        if spec.qkv_bias:
            self.qkv_bias = leaf((K, G + 2, H), ("kv_heads", "heads", None), dtype)
        if spec.o_bias:
            self.o_bias = leaf((E,), ("embed",), dtype)
        if spec.qk_norm:
            self.q_norm = leaf((H,), (None,), dtype)
            self.k_norm = leaf((H,), (None,), dtype)

    def __call__(
        self, x_te: jax.Array, kv_pages: KVPages, batch: RaggedBatch, rope: Rotation
    ) -> tuple[jax.Array, KVPages]:
        """[T, E] -> [T, E] float32, and the pages with the batch's keys and values written."""
        qkv = linear(x_te, self.qkv[...])  # [T, K, G+2, H]
        if self.spec.qkv_bias:
            qkv += self.qkv_bias[...].astype(jnp.float32)
        q_tkgh, k_tkh, v_tkh = qkv[:, :, :-2], qkv[:, :, -2], qkv[:, :, -1]
        if self.spec.qk_norm:
            q_tkgh = rms_norm(q_tkgh, self.q_norm[...], self.spec)
            k_tkh = rms_norm(k_tkh, self.k_norm[...], self.spec)
        T, K, G, H = q_tkgh.shape
        q_tnh = rotate(q_tkgh, rope).astype(x_te.dtype).reshape(T, K * G, H)
        k_tkh = rotate(k_tkh, rope).astype(x_te.dtype)
        attended, kv_pages = self._attend(q_tnh, k_tkh, v_tkh.astype(x_te.dtype), kv_pages, batch)
        out = linear(attended.reshape(T, K, G, H), self.o[...], num_in_axes=3)
        out = constrain(out, self.mesh, (None, "embed"))
        if self.spec.o_bias:
            out += self.o_bias[...].astype(jnp.float32)
        return out, kv_pages

    def _attend(
        self,
        q_tnh: jax.Array,
        k_tkh: jax.Array,
        v_tkh: jax.Array,
        kv_pages: KVPages,
        batch: RaggedBatch,
    ) -> tuple[jax.Array, KVPages]:
        """Writes the keys and values, then attends; each device on its own kv heads."""

        def attend(q_tnh, k_tkh, v_tkh, kv_pages, batch):
            kv_pages = kv_cache_update(kv_pages, k_tkh, v_tkh, batch.slot_mapping)
            attended = ragged_paged_attention(
                q_tnh,
                kv_pages,
                batch.block_tables,
                batch.seq_lens,
                batch.query_start_loc,
                scale=self.spec.query_scale,
                sliding_window=self.sliding_window,
                decode_only=batch.decode_only,
            )
            return attended, kv_pages

        if tensor_parallel_size(self.mesh) > 1:
            heads = partition_spec((None, "kv_heads", None))
            pages = partition_spec(KV_PAGES_AXES)
            attend = jax.shard_map(
                attend,
                mesh=self.mesh,
                in_specs=(heads, heads, heads, (pages, pages), PartitionSpec()),
                out_specs=(heads, (pages, pages)),
                check_vma=False,
            )
        return attend(q_tnh, k_tkh, v_tkh, kv_pages, batch)
