"""Leaves and the small pieces of a decoder layer. Norms and activations compute in float32, matmuls add up in it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import prod

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, PartitionSpec

from jaxinfer.models.sharded_dims import ShardedDims
from jaxinfer.models.spec import Activation, DecoderSpec
from jaxinfer.parallel.mesh import LogicalAxes, named_sharding, tensor_parallel_size
from kernels_pallas import add_rms_norm as fused_add_rms_norm
from kernels_pallas.trace_target import hopper

_ACTIVATIONS: dict[Activation, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "gelu_tanh": lambda x: jax.nn.gelu(x, approximate=True),
}


_NUM_CORES = 132
"""Of a Hopper GPU."""
_LEAST_PART = 512
"""Elements of the contracted axis, below which a tile's start and end cost as much as what is between."""


def leaf(shape: tuple[int, ...], axes: LogicalAxes, dtype: jnp.dtype) -> nnx.Param:
    """A weight, described once: shape, logical axes and dtype. Its values come from a checkpoint."""
    return nnx.Param(jnp.zeros(shape, dtype), logical_axes=axes)


def rms_norm(x: jax.Array, weight: jax.Array, spec: DecoderSpec) -> jax.Array:
    """Normalises the last axis; float32, whatever the input's dtype."""
    x = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + spec.norm_eps)
    return x * scale * (weight.astype(jnp.float32) + spec.norm_weight_offset)


def add_rms_norm(
    spec: DecoderSpec,
    mesh: Mesh,
    x_te: jax.Array,
    update: jax.Array,
    weight: jax.Array,
    update_weight: jax.Array | None,
) -> tuple[jax.Array, jax.Array]:
    """`kernels_pallas.add_rms_norm` with the model's norm, on each device for itself."""
    devices = tensor_parallel_size(mesh)
    # XLA adds a matmul's whole product to the stream where the matmul writes it, which moves fewer bytes than a kernel that
    # reads both; it can't where sums over devices or another norm come between.
    is_epilogue = update.ndim == 2 and devices == 1 and update_weight is None
    norm = partial(
        fused_add_rms_norm,
        eps=spec.norm_eps,
        weight_offset=spec.norm_weight_offset,
        implementation="xla" if is_epilogue else None,
    )

    def run(x_te, update, weight, update_weight):
        return norm(x_te, update, weight, update_weight=update_weight)

    if _on_gpu(mesh) and devices > 1:  # a kernel can't be partitioned by XLA
        everywhere = PartitionSpec()
        run = jax.shard_map(
            run, mesh=mesh, in_specs=everywhere, out_specs=everywhere, check_vma=False
        )
    return run(x_te, update, weight, update_weight)


def _on_gpu(mesh: Mesh) -> bool:
    return mesh.devices.flat[0].platform in ("gpu", "cuda")


def product_dtype(mesh: Mesh, dtype: jnp.dtype) -> jnp.dtype:
    """In which a layer's matmuls of `dtype` hand on their products.

    A GPU's tensor cores add up in float32 whatever they write, and half the bytes written are time saved; a CPU keeps
    the float32 that it has.
    """
    return jnp.dtype(dtype if _on_gpu(mesh) else jnp.float32)


def num_partial_sums(mesh: Mesh, num_tokens: int, out_size: int, in_size: int) -> int:
    """Into how many sums a matmul is cut whose result `add_rms_norm` takes.

    The output of a decode step has so few tiles of 64 x 128 that most cores of a GPU would have none: parts of the
    contracted axis make as many as there are cores. XLA would cut it too, and add up in a kernel of its own. With
    several devices what each has is added up between them first.
    """
    device = mesh.devices.flat[0]
    if not _on_gpu(mesh) or not hopper(device.device_kind) or tensor_parallel_size(mesh) > 1:
        return 1
    tiles, parts = -(-num_tokens // 64) * -(-out_size // 128), 1
    while (
        2 * parts * tiles <= _NUM_CORES
        and in_size % (2 * parts) == 0
        and in_size >= 2 * parts * _LEAST_PART
    ):
        parts *= 2
    return parts


def linear(
    x: jax.Array,
    weight: jax.Array,
    dtype: jnp.dtype = jnp.float32,
    num_in_axes: int = 1,
    num_partial_sums: int = 1,
) -> jax.Array:
    """[T, *in] times [*out, *in] -> [T, *out] in `dtype`, where `in` are `num_in_axes` axes.

    With several partial sums [num_partial_sums, T, *out] in float32, each of one part of `in`.

    The product is of two matrices: on CPU a bf16 matmul whose operand has more axes takes up to ten times as long.
    Only an array's leading axis may be cut along the mesh among those that are merged.
    """
    num_out_axes = weight.ndim - num_in_axes
    out_shape, in_size = weight.shape[:num_out_axes], prod(weight.shape[num_out_axes:])
    if num_partial_sums > 1:
        parts = jax.lax.dot_general(
            x.reshape(x.shape[0], num_partial_sums, -1),
            weight.reshape(prod(out_shape), num_partial_sums, -1),
            (((2,), (2,)), ((1,), (1,))),
            precision=matmul_precision(weight.dtype),
            preferred_element_type=jnp.float32,
        )
        return parts.reshape(num_partial_sums, x.shape[0], *out_shape)
    product = jax.lax.dot_general(
        x.reshape(x.shape[0], in_size),
        weight.reshape(prod(out_shape), in_size),
        (((1,), (1,)), ((), ())),
        precision=matmul_precision(weight.dtype),
        preferred_element_type=dtype,
    )
    return product.reshape(x.shape[0], *out_shape)


def matmul_precision(dtype: jnp.dtype) -> jax.lax.Precision:
    """float32 models get float32 products, where a GPU's default would be TF32."""
    return jax.lax.Precision.HIGHEST if dtype == jnp.float32 else jax.lax.Precision.DEFAULT


def constrain(x: jax.Array, mesh: Mesh, axes: LogicalAxes) -> jax.Array:
    """Says how `x` is cut over the devices; all-None axes put the whole of it on each, partial sums added up."""
    if tensor_parallel_size(mesh) == 1:
        return x
    return jax.lax.with_sharding_constraint(x, named_sharding(mesh, axes))


class GatedMlp(nnx.Module):
    """down(activation(gate(x)) * up(x)), gate and up in one leaf."""

    def __init__(self, spec: DecoderSpec, dims: ShardedDims, mesh: Mesh, dtype: jnp.dtype):
        E, M = spec.embed_dim, dims.mlp_dim
        self.spec, self.mesh = spec, mesh
        self.gate_up = leaf((2, M, E), (None, "mlp", "embed"), dtype)
        self.down = leaf((E, M), ("embed", "mlp"), dtype)
        if spec.mlp_bias:
            self.gate_up_bias = leaf((2, M), (None, "mlp"), dtype)
            self.down_bias = leaf((E,), ("embed",), dtype)

    def __call__(self, x_te: jax.Array) -> jax.Array:
        """[T, E] -> [T, E], or [S, T, E] partial sums."""
        weight, dtype = self.gate_up[...], product_dtype(self.mesh, x_te.dtype)
        if tensor_parallel_size(self.mesh) == 1:
            gate_up = linear(x_te, weight, dtype)
        else:  # merging [2, M] would merge an axis that is cut, so the axes stay apart
            gate_up = jnp.einsum(
                "te,gme->tgm",
                x_te,
                weight,
                precision=matmul_precision(weight.dtype),
                preferred_element_type=dtype,
            )
        if self.spec.mlp_bias:
            gate_up += self.gate_up_bias[...].astype(dtype)
        gate_up = gate_up.astype(jnp.float32)
        hidden = _ACTIVATIONS[self.spec.activation](gate_up[:, 0]) * gate_up[:, 1]
        down = self.down[...]
        parts = 1 if self.spec.mlp_bias else num_partial_sums(self.mesh, len(x_te), *down.shape)
        out = linear(hidden.astype(x_te.dtype), down, dtype, num_partial_sums=parts)
        out = constrain(out, self.mesh, (None, "embed"))
        if self.spec.mlp_bias:
            out += self.down_bias[...].astype(dtype)
        return out
