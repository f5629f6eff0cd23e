"""Kimi's delta attention (arXiv 2510.26692): the gated delta rule with a decay of its own for each channel of a key."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from jaxinfer.models.batch import RaggedBatch
from jaxinfer.models.delta_net import unit
from jaxinfer.models.gated_delta import DeltaInputs, gated_delta
from jaxinfer.models.layers import leaf, linear, matmul_precision, product_dtype
from jaxinfer.models.mlp import ACTIVATION_FUNCTIONS
from jaxinfer.models.recurrence import StateRows, causal_conv
from jaxinfer.models.state_layers import (
    States,
    on_each_device,
    project_out,
    shared_channels,
    state_shape,
)
from jaxinfer.models.state_spec import KimiDeltaSpec

_FLOAT32 = jnp.dtype(jnp.float32)


class KimiDelta(nnx.Module):
    """Heads are cut along the mesh."""

    def __init__(self, spec: KimiDeltaSpec, embed_dim: int, mesh: Mesh, dtype: jnp.dtype):
        E, H, D = embed_dim, shared_channels(spec.num_heads, mesh), spec.head_dim
        rows = 3 * D + 1  # query, key, value, beta
        self.spec, self.mesh = spec, mesh
        self.gate_in = leaf((2, spec.gate_rank, E), (None, None, "embed"), dtype)
        self.gate_out = leaf((H, 2, D, spec.gate_rank), ("channels", None, None, None), dtype)
        self.in_proj = leaf((H, rows, E), ("channels", None, "embed"), dtype)
        self.conv = leaf((spec.conv_kernel, H, 3 * D), (None, "channels", None), dtype)
        self.dt_bias = leaf((H, D), ("channels", None), _FLOAT32)
        self.a_log = leaf((H,), ("channels",), _FLOAT32)
        self.norm = leaf((D,), (None,), dtype)
        self.out_proj = leaf((E, H, D), ("embed", "channels", None), dtype)

    @staticmethod
    def state_shapes(
        spec: KimiDeltaSpec, embed_dim: int, mesh: Mesh, dtype: jnp.dtype, num_slots: int
    ) -> tuple[jax.ShapeDtypeStruct, ...]:
        """The inputs of the convolution [num_slots, K-1, H, 3*D] and the states [num_slots, H, 1, D, D]."""
        H, D = spec.num_heads, spec.head_dim
        inputs = (num_slots, spec.conv_kernel - 1, H, 3 * D)
        states = (num_slots, H, 1, D, D)
        return (
            state_shape(mesh, inputs, (None, None, "channels", None), dtype),
            state_shape(mesh, states, (None, "channels", None, None, None), _FLOAT32),
        )

    def __call__(
        self, h_te: jax.Array, states: States, batch: RaggedBatch
    ) -> tuple[jax.Array, States]:
        """[T, E] -> [T, E] or [S, T, E] partial sums, and the states after the batch."""
        dtype = product_dtype(self.mesh, h_te.dtype)
        qkvb = linear(h_te, self.in_proj[...], dtype)  # [T, H, rows]
        low = linear(h_te, self.gate_in[...]).astype(h_te.dtype)
        decay, gate = jnp.einsum(
            "tgr,hgdr->gthd",
            low,
            self.gate_out[...],
            precision=matmul_precision(h_te.dtype),
            preferred_element_type=jnp.float32,
        )
        heads, slots, whole = (None, "channels"), (None, None, "channels"), ("channels",)
        recur = on_each_device(
            self.mesh,
            partial(_recur_heads, self.spec),
            (heads, heads, heads, heads, (), whole, whole, slots, heads, ()),
            (heads, slots, heads),
        )
        y_thd, *states = recur(
            qkvb,
            decay,
            gate,
            self.conv[...],
            self.norm[...],
            self.a_log[...],
            self.dt_bias[...],
            *states,
            StateRows.of(batch),
        )
        out = project_out(self.mesh, y_thd.astype(h_te.dtype), self.out_proj[...], None)
        return out, tuple(states)


def _recur_heads(
    spec: KimiDeltaSpec,
    qkvb: jax.Array,
    decay: jax.Array,
    gate: jax.Array,
    conv: jax.Array,
    norm: jax.Array,
    a_log: jax.Array,
    dt_bias: jax.Array,
    conv_states: jax.Array,
    delta_states: jax.Array,
    rows: StateRows,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """All of a device's heads between the projections: [T, H, 3*D + 1] to [T, H, D], and their states."""
    D, rate = spec.head_dim, jnp.exp(a_log)[:, None]
    convolved, conv_states = causal_conv(qkvb[..., :-1], conv, None, conv_states, rows)
    convolved = ACTIVATION_FUNCTIONS[spec.activation](convolved)
    q, k, v = jnp.split(convolved, 3, axis=-1)
    log_decay = -rate * jax.nn.softplus(decay.astype(jnp.float32) + dt_bias)
    inputs = DeltaInputs(
        q=unit(q) * D**-0.5,
        k=unit(k),
        v=v[:, :, None],
        log_decay=log_decay[:, :, None],
        beta=jax.nn.sigmoid(qkvb[..., -1:].astype(jnp.float32)),
    )
    y, delta_states = gated_delta(inputs, delta_states, rows)
    y = y[:, :, 0]
    y = y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + spec.norm_eps)
    y = y * norm.astype(jnp.float32) * jax.nn.sigmoid(gate.astype(jnp.float32))
    return y, conv_states, delta_states
