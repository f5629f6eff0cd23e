"""The MLPs of a decoder layer. Activations compute in float32."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from jaxinfer.models.layers import (
    constrain,
    leaf,
    linear,
    matmul_precision,
    num_partial_sums,
    product_dtype,
    scaled,
)
from jaxinfer.models.lora import LayerAdapters, add_updates, has_updates
from jaxinfer.models.sharded_dims import round_up
from jaxinfer.models.spec import Activation, GatedMlpSpec, MlpSpec, PlainMlpSpec
from jaxinfer.models.stored_weight import StoredWeight
from jaxinfer.parallel.mesh import tensor_parallel_size

ACTIVATION_FUNCTIONS: dict[Activation, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "gelu_tanh": lambda x: jax.nn.gelu(x, approximate=True),
    "quick_gelu": lambda x: x * jax.nn.sigmoid(1.702 * x),
    "relu": jax.nn.relu,
    "relu2": lambda x: jnp.square(jax.nn.relu(x)),
}


def xielu(x: jax.Array, parameters: jax.Array) -> jax.Array:
    """xIELU (arXiv 2411.13010), whose slopes are trained: `parameters` are alpha_p, alpha_n, beta and epsilon."""
    alpha_p, alpha_n, beta, epsilon = parameters
    positive = jax.nn.softplus(alpha_p) * x * x
    negative = (beta + jax.nn.softplus(alpha_n)) * (jnp.expm1(jnp.minimum(x, epsilon)) - x)
    return jnp.where(x > 0, positive, negative) + beta * x


class GatedMlp(nnx.Module):
    """down(activation(gate(x)) * up(x)), gate and up in one leaf."""

    def __init__(self, spec: GatedMlpSpec, embed_dim: int, mesh: Mesh, dtype: jnp.dtype):
        E, M = embed_dim, round_up(spec.mlp_dim, tensor_parallel_size(mesh))
        self.spec, self.mesh = spec, mesh
        self.gate_up = leaf((2, M, E), (None, "mlp", "embed"), dtype, num_in_axes=1)
        self.down = leaf((E, M), ("embed", "mlp"), dtype, num_in_axes=1)
        if spec.bias:
            self.gate_up_bias = leaf((2, M), (None, "mlp"), dtype)
            self.down_bias = leaf((E,), ("embed",), dtype)

    def __call__(self, x_te: jax.Array, adapters: LayerAdapters | None = None) -> jax.Array:
        """[T, E] -> [T, E], or [S, T, E] partial sums."""
        return self.project(self.hidden(x_te, adapters), adapters)

    def hidden(self, x_te: jax.Array, adapters: LayerAdapters | None = None) -> jax.Array:
        """What `down` takes: [T, E] -> [T, M]."""
        weight, dtype = self.gate_up[...], product_dtype(self.mesh, x_te.dtype)
        if tensor_parallel_size(self.mesh) == 1 or isinstance(weight, StoredWeight):
            gate_up = linear(x_te, weight, dtype)
        else:  # merging [2, M] would merge an axis that is cut, so the axes stay apart
            gate_up = jnp.einsum(
                "te,gme->tgm",
                x_te,
                weight,
                precision=matmul_precision(weight.dtype),
                preferred_element_type=dtype,
            )
        gate_up = add_updates(gate_up, adapters, "gate_up", x_te)
        if self.spec.bias:
            gate_up += self.gate_up_bias[...].astype(dtype)
        gate_up = gate_up.astype(jnp.float32)
        gate = scaled(gate_up[:, 0], self.spec.gate_scale)
        hidden = ACTIVATION_FUNCTIONS[self.spec.activation](gate) * gate_up[:, 1]
        return hidden.astype(x_te.dtype)

    def project(self, hidden_tm: jax.Array, adapters: LayerAdapters | None = None) -> jax.Array:
        """[T, M] -> [T, E], or [S, T, E] partial sums."""
        return scaled(project_down(self, hidden_tm, adapters), self.spec.out_scale)


class PlainMlp(nnx.Module):
    """down(activation(up(x)))"""

    def __init__(self, spec: PlainMlpSpec, embed_dim: int, mesh: Mesh, dtype: jnp.dtype):
        E, M = embed_dim, round_up(spec.mlp_dim, tensor_parallel_size(mesh))
        self.spec, self.mesh = spec, mesh
        self.up = leaf((M, E), ("mlp", "embed"), dtype, num_in_axes=1)
        self.down = leaf((E, M), ("embed", "mlp"), dtype, num_in_axes=1)
        if spec.activation == "xielu":
            self.xielu = leaf((4,), (None,), jnp.dtype(jnp.float32))
        if spec.bias:
            self.up_bias = leaf((M,), ("mlp",), dtype)
            self.down_bias = leaf((E,), ("embed",), dtype)

    def __call__(self, x_te: jax.Array, adapters: LayerAdapters | None = None) -> jax.Array:
        """[T, E] -> [T, E], or [S, T, E] partial sums."""
        dtype = product_dtype(self.mesh, x_te.dtype)
        hidden = add_updates(linear(x_te, self.up[...], dtype), adapters, "up", x_te)
        if self.spec.bias:
            hidden += self.up_bias[...].astype(dtype)
        hidden = hidden.astype(jnp.float32)
        if self.spec.activation == "xielu":
            hidden = xielu(hidden, self.xielu[...])
        else:
            hidden = ACTIVATION_FUNCTIONS[self.spec.activation](hidden)
        return project_down(self, hidden.astype(x_te.dtype), adapters)


def project_down(
    mlp: GatedMlp | PlainMlp, hidden_tm: jax.Array, adapters: LayerAdapters | None
) -> jax.Array:
    """[T, M] -> [T, E], or [S, T, E] partial sums."""
    down, dtype = mlp.down[...], product_dtype(mlp.mesh, hidden_tm.dtype)
    whole = mlp.spec.bias or has_updates(adapters, "down")
    parts = 1 if whole else num_partial_sums(mlp.mesh, len(hidden_tm), *down.shape)
    out = linear(hidden_tm, down, dtype, num_partial_sums=parts)
    out = constrain(out, mlp.mesh, (None, "embed"))
    out = add_updates(out, adapters, "down", hidden_tm)
    if mlp.spec.bias:
        out += mlp.down_bias[...].astype(dtype)
    return out


_MODULES: dict[type[MlpSpec], type[GatedMlp] | type[PlainMlp]] = {
    GatedMlpSpec: GatedMlp,
    PlainMlpSpec: PlainMlp,
}


def make_mlp(spec: MlpSpec, embed_dim: int, mesh: Mesh, dtype: jnp.dtype) -> GatedMlp | PlainMlp:
    return _MODULES[type(spec)](spec, embed_dim, mesh, dtype)
