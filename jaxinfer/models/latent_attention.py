"""Multi-head latent attention over a paged cache of latents, in its absorbed form.

The matrices that expand a latent into keys and values are applied to the queries and to what the heads return instead, so that
all heads attend with the latents themselves. Tensor parallelism shares the heads out; every device has all of the cache.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, PartitionSpec

from jaxinfer.models.batch import RaggedBatch
from jaxinfer.models.latent_spec import LatentAttentionSpec
from jaxinfer.models.layers import constrain, leaf, linear, matmul_precision, product_dtype
from jaxinfer.models.norms import add_norm_leaves, norm_of
from jaxinfer.models.rope import Rotation
from jaxinfer.models.sharded_dims import round_up
from jaxinfer.models.stored_weight import StoredWeight
from jaxinfer.parallel.mesh import partition_spec, tensor_parallel_size
from kernels_pallas import mla_attention, mla_cache_update
from kernels_pallas.rope_kv_cache_update.xla import rotate

LatentPages = tuple[jax.Array]
"""One layer's [num_pages, page_size, L + R]."""


class LatentAttention(nnx.Module):
    """N heads; latents of rank L; queries and keys of D plain and R rotated dimensions, values of V; queries out of Q."""

    def __init__(self, spec: LatentAttentionSpec, embed_dim: int, mesh: Mesh, dtype: jnp.dtype):
        N = round_up(spec.num_heads, tensor_parallel_size(mesh))
        E, L, D, R, V = (
            embed_dim, spec.latent_rank, spec.plain_dim, spec.rope_dim, spec.value_dim,
        )  # fmt: skip
        self.spec, self.mesh = spec, mesh
        Q = spec.query_rank or E
        if spec.query_rank is not None:
            self.q_down = leaf((Q, E), (None, "embed"), dtype, num_in_axes=1)
            add_norm_leaves(self, "q_norm", spec.norm, (Q,), (None,), dtype)
        self.q_up = leaf((N, D + R, Q), ("latent_heads", None, None), dtype, num_in_axes=1)
        self.kv_down = leaf((L + R, E), (None, "embed"), dtype, num_in_axes=1)
        add_norm_leaves(self, "kv_norm", spec.norm, (L,), (None,), dtype)
        self.k_up = leaf((N, D, L), ("latent_heads", None, None), dtype)
        self.v_up = leaf((N, V, L), ("latent_heads", None, None), dtype)
        self.o = leaf((E, N, V), ("embed", "latent_heads", None), dtype, num_in_axes=2)
        if spec.bias:
            if spec.query_rank is not None:
                self.q_down_bias = leaf((Q,), (None,), dtype)
            self.kv_down_bias = leaf((L + R,), (None,), dtype)
            self.o_bias = leaf((E,), ("embed",), dtype)

    def __call__(
        self, x_te: jax.Array, kv_pages: LatentPages, batch: RaggedBatch, rope: Rotation
    ) -> tuple[jax.Array, LatentPages]:
        """[T, E] -> [T, E], and the pages with the batch's latents written."""
        spec, dtype = self.spec, product_dtype(self.mesh, x_te.dtype)
        latent_tl, k_rope_tr = self._compressed(x_te, rope)
        out_tnv, pages = self._attend(
            self._query_input(x_te), latent_tl, k_rope_tr, kv_pages[0], batch, rope
        )
        out_te = constrain(
            linear(out_tnv, self.o[...], dtype, num_in_axes=2), self.mesh, (None, "embed")
        )
        if spec.bias:
            out_te += self.o_bias[...].astype(dtype)
        return out_te, (pages,)

    def _query_input(self, x_te: jax.Array) -> jax.Array:
        """What the queries are expanded from: [T, Q], or the token [T, E]."""
        if self.spec.query_rank is None:
            return x_te
        down_tq = linear(x_te, self.q_down[...])
        if self.spec.bias:
            down_tq += self.q_down_bias[...].astype(jnp.float32)
        return norm_of(self, "q_norm", self.spec.norm)(down_tq).astype(x_te.dtype)

    def _compressed(self, x_te: jax.Array, rope: Rotation) -> tuple[jax.Array, jax.Array]:
        """What the cache keeps of each token, in float32: the normed latent [T, L] and the rotated key [T, R]."""
        down_tc = linear(x_te, self.kv_down[...])
        if self.spec.bias:
            down_tc += self.kv_down_bias[...].astype(jnp.float32)
        latent_tl, k_rope_tr = jnp.split(down_tc, [self.spec.latent_rank], axis=1)
        latent_tl = norm_of(self, "kv_norm", self.spec.norm)(latent_tl) * self.spec.latent_factor
        return latent_tl, rotate(k_rope_tr, *rope)

    def _attend(
        self,
        query_tq: jax.Array,
        latent_tl: jax.Array,
        k_rope_tr: jax.Array,
        pages: jax.Array,
        batch: RaggedBatch,
        rope: Rotation,
    ) -> tuple[jax.Array, jax.Array]:
        """Writes the latents, then attends, each device with its own heads: [T, N, V], and the pages."""
        spec, dtype = self.spec, query_tq.dtype
        product = product_dtype(self.mesh, dtype)

        def by_head(equation: str, x: jax.Array, weight: jax.Array) -> jax.Array:
            precision = matmul_precision(weight.dtype)
            return jnp.einsum(
                equation, x, weight, precision=precision, preferred_element_type=product
            )

        def attend(query_tq, latent_tl, k_rope_tr, pages, batch, rope, q_up, k_up, v_up):
            kept = (x.astype(pages.dtype) for x in (latent_tl, k_rope_tr))
            pages = mla_cache_update(pages, *kept, batch.slot_mapping)
            q_tnh = linear(
                query_tq, q_up.local if isinstance(q_up, StoredWeight) else q_up, product
            )
            if spec.query_factor != 1:
                q_tnh *= jnp.asarray(spec.query_factor, q_tnh.dtype)
            q_plain_tnd, q_rope_tnr = jnp.split(q_tnh, [spec.plain_dim], axis=2)
            out_tnl = mla_attention(
                by_head("tnd,ndl->tnl", q_plain_tnd.astype(dtype), k_up).astype(pages.dtype),
                rotate(q_rope_tnr, *rope).astype(pages.dtype),
                pages,
                batch.block_tables,
                batch.seq_lens,
                batch.query_start_loc,
                scale=spec.query_scale,
                decode_only=batch.decode_only,
            )
            return by_head("tnl,nvl->tnv", out_tnl, v_up).astype(dtype), pages

        q_up = self.q_up[...]
        if tensor_parallel_size(self.mesh) > 1:
            everywhere = PartitionSpec()
            heads = partition_spec(("latent_heads", None, None))
            q_up_spec = q_up.partition_specs() if isinstance(q_up, StoredWeight) else heads
            attend = jax.shard_map(
                attend,
                mesh=self.mesh,
                in_specs=(*(everywhere,) * 6, q_up_spec, heads, heads),
                out_specs=(partition_spec((None, "latent_heads", None)), everywhere),
                check_vma=False,
            )
        return attend(
            query_tq, latent_tl, k_rope_tr, pages, batch, rope,
            q_up, self.k_up[...], self.v_up[...],
        )  # fmt: skip
