"""Linear attention by the gated delta rule, with its convolution, norm and gate."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from jaxinfer.models.batch import RaggedBatch
from jaxinfer.models.gated_delta import DeltaInputs, gated_delta
from jaxinfer.models.layers import leaf, linear, product_dtype
from jaxinfer.models.mlp import ACTIVATION_FUNCTIONS
from jaxinfer.models.recurrence import StateRows, causal_conv
from jaxinfer.models.sharded_groups import ShardedGroups
from jaxinfer.models.state_layers import (
    States,
    on_each_device,
    project_out,
    state_shape,
)
from jaxinfer.models.state_spec import DeltaNetSpec
from jaxinfer.parallel.mesh import tensor_parallel_size

_FLOAT32 = jnp.dtype(jnp.float32)
_UNIT_EPS = 1e-6
"""What keys and queries of length zero are divided by, squared."""


class DeltaNet(nnx.Module):
    """Key heads with their value heads are cut along the mesh."""

    def __init__(self, spec: DeltaNetSpec, embed_dim: int, mesh: Mesh, dtype: jnp.dtype):
        self.groups = ShardedGroups.create(
            spec.num_key_heads, spec.num_value_heads, tensor_parallel_size(mesh)
        )
        E, G, Q = embed_dim, self.groups.num_groups, self.groups.heads_per_group
        values, convolved = Q * spec.value_dim, 2 * spec.key_dim + Q * spec.value_dim
        rows = convolved + values + 2 * Q  # query, key, values, gates, betas, decays
        self.spec, self.mesh = spec, mesh
        self.in_proj = leaf((G, rows, E), ("channels", None, "embed"), dtype)
        self.conv = leaf((spec.conv_kernel, G, convolved), (None, "channels", None), dtype)
        self.dt_bias = leaf((G, Q), ("channels", None), _FLOAT32)
        self.a_log = leaf((G, Q), ("channels", None), _FLOAT32)
        self.norm = leaf((spec.value_dim,), (None,), dtype)
        self.out_proj = leaf((E, G, values), ("embed", "channels", None), dtype)

    @staticmethod
    def state_shapes(
        spec: DeltaNetSpec, embed_dim: int, mesh: Mesh, dtype: jnp.dtype, num_slots: int
    ) -> tuple[jax.ShapeDtypeStruct, ...]:
        """The inputs of the convolution [num_slots, K-1, G, C] and the states [num_slots, G, Q, key_dim, value_dim]."""
        groups = ShardedGroups.create(
            spec.num_key_heads, spec.num_value_heads, tensor_parallel_size(mesh)
        )
        G, Q = groups.num_groups, groups.heads_per_group
        inputs = (num_slots, spec.conv_kernel - 1, G, 2 * spec.key_dim + Q * spec.value_dim)
        states = (num_slots, G, Q, spec.key_dim, spec.value_dim)
        return (
            state_shape(mesh, inputs, (None, None, "channels", None), dtype),
            state_shape(mesh, states, (None, "channels", None, None, None), _FLOAT32),
        )

    def __call__(
        self, h_te: jax.Array, states: States, batch: RaggedBatch
    ) -> tuple[jax.Array, States]:
        """[T, E] -> [T, E] or [S, T, E] partial sums, and the states after the batch."""
        projected = linear(h_te, self.in_proj[...], product_dtype(self.mesh, h_te.dtype))
        groups, slots = (None, "channels"), (None, None, "channels")
        recur = on_each_device(
            self.mesh,
            partial(_recur_heads, self.spec, self.groups.heads_per_group),
            (groups, groups, (), ("channels",), ("channels",), slots, groups, ()),
            (groups, slots, groups),
        )
        y_tgi, *states = recur(
            projected,
            self.conv[...],
            self.norm[...],
            self.a_log[...],
            self.dt_bias[...],
            *states,
            StateRows.of(batch),
        )
        out = project_out(self.mesh, y_tgi.astype(h_te.dtype), self.out_proj[...], None)
        return out, tuple(states)


def _recur_heads(
    spec: DeltaNetSpec,
    heads_per_group: int,
    projected: jax.Array,
    conv: jax.Array,
    norm: jax.Array,
    a_log: jax.Array,
    dt_bias: jax.Array,
    conv_states: jax.Array,
    delta_states: jax.Array,
    rows: StateRows,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """All of a device's heads between the projections: [T, G, rows] to [T, G, Q*value_dim], and their states."""
    K, Q, V = spec.key_dim, heads_per_group, spec.value_dim
    ends = (2 * K + Q * V, 2 * K + 2 * Q * V, 2 * K + 2 * Q * V + Q)
    convolved, gate, beta, dt = jnp.split(projected, ends, axis=-1)
    convolved, conv_states = causal_conv(convolved, conv, None, conv_states, rows)
    convolved = ACTIVATION_FUNCTIONS[spec.activation](convolved)
    q, k, v = jnp.split(convolved, (K, 2 * K), axis=-1)
    gate, beta, dt = (x.astype(jnp.float32) for x in (gate, beta, dt))
    log_decay = -jnp.exp(a_log) * jax.nn.softplus(dt + dt_bias)
    inputs = DeltaInputs(
        q=unit(q) * K**-0.5,
        k=unit(k),
        v=v.reshape(*v.shape[:2], Q, V),
        log_decay=log_decay[..., None],
        beta=spec.max_beta * jax.nn.sigmoid(beta),
    )
    y, delta_states = gated_delta(inputs, delta_states, rows)
    y = y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + spec.norm_eps)
    y = y * norm.astype(jnp.float32) * jax.nn.silu(gate.reshape(y.shape))
    return y.reshape(*y.shape[:2], Q * V), conv_states, delta_states


def unit(x: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + _UNIT_EPS)
