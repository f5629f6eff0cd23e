"""Leaves and the small pieces of a decoder layer. Norms and activations compute in float32, matmuls add up in it."""

from __future__ import annotations

from collections.abc import Callable
from math import prod

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from jaxinfer.models.sharded_dims import ShardedDims
from jaxinfer.models.spec import Activation, DecoderSpec
from jaxinfer.parallel.mesh import LogicalAxes, named_sharding, tensor_parallel_size

_ACTIVATIONS: dict[Activation, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "gelu_tanh": lambda x: jax.nn.gelu(x, approximate=True),
}


def leaf(shape: tuple[int, ...], axes: LogicalAxes, dtype: jnp.dtype) -> nnx.Param:
    """A weight, described once: shape, logical axes and dtype. Its values come from a checkpoint."""
    return nnx.Param(jnp.zeros(shape, dtype), logical_axes=axes)


def rms_norm(x: jax.Array, weight: jax.Array, spec: DecoderSpec) -> jax.Array:
    """Normalises the last axis; float32, whatever the input's dtype."""
    x = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + spec.norm_eps)
    return x * scale * (weight.astype(jnp.float32) + spec.norm_weight_offset)


def product_dtype(mesh: Mesh, dtype: jnp.dtype) -> jnp.dtype:
    """In which a layer's matmuls of `dtype` hand on their products.

    A GPU's tensor cores add up in float32 whatever they write, and half the bytes written are time saved; a CPU keeps
    the float32 that it has.
    """
    on_gpu = mesh.devices.flat[0].platform in ("gpu", "cuda")
    return jnp.dtype(dtype if on_gpu else jnp.float32)


def linear(
    x: jax.Array, weight: jax.Array, dtype: jnp.dtype = jnp.float32, num_in_axes: int = 1
) -> jax.Array:
    """[T, *in] times [*out, *in] -> [T, *out] in `dtype`, where `in` are `num_in_axes` axes.

    The product is of two matrices: on CPU a bf16 matmul whose operand has more axes takes up to ten times as long.
    Only an array's leading axis may be cut along the mesh among those that are merged.
    """
    num_out_axes = weight.ndim - num_in_axes
    out_shape, in_size = weight.shape[:num_out_axes], prod(weight.shape[num_out_axes:])
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
        """[T, E] -> [T, E]."""
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
        out = linear(hidden.astype(x_te.dtype), self.down[...], dtype)
        out = constrain(out, self.mesh, (None, "embed"))
        if self.spec.mlp_bias:
            out += self.down_bias[...].astype(dtype)
        return out
