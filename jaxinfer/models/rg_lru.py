"""The real-gated linear recurrent unit of RecurrentGemma (arXiv 2402.19427), with its convolution and gate."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from jaxinfer.models.batch import RaggedBatch
from jaxinfer.models.layers import leaf, linear, matmul_precision, product_dtype
from jaxinfer.models.mlp import ACTIVATION_FUNCTIONS
from jaxinfer.models.recurrence import StateRows, causal_conv, recur
from jaxinfer.models.selective_scan import linear_recurrence
from jaxinfer.models.state_layers import (
    States,
    on_each_device,
    project_out,
    shared_channels,
    state_shape,
)
from jaxinfer.models.state_spec import RgLruSpec

_FLOAT32 = jnp.dtype(jnp.float32)
_CHUNK = 128
"""Tokens for which the states of a whole layer exist at once: [128, D]."""
_SHARPNESS = -8.0
"""Factor on the logarithm of the decay."""


class RgLru(nnx.Module):
    """Blocks of channels, each with gates of its own, are cut along the mesh."""

    def __init__(self, spec: RgLruSpec, embed_dim: int, mesh: Mesh, dtype: jnp.dtype):
        E, B, W = embed_dim, shared_channels(spec.num_blocks, mesh), spec.block_dim
        self.spec, self.mesh = spec, mesh
        self.in_proj = leaf((B, 2, W, E), ("channels", None, None, "embed"), dtype)
        self.in_bias = leaf((B, 2, W), ("channels", None, None), dtype)
        self.conv = leaf((spec.conv_kernel, B, W), (None, "channels", None), dtype)
        self.conv_bias = leaf((B, W), ("channels", None), dtype)
        self.gates = leaf((B, 2, W, W), ("channels", None, None, None), dtype)
        self.gate_bias = leaf((B, 2, W), ("channels", None, None), dtype)
        self.decay = leaf((B, W), ("channels", None), _FLOAT32)
        self.out_proj = leaf((E, B, W), ("embed", "channels", None), dtype)
        self.out_bias = leaf((E,), ("embed",), dtype)

    @staticmethod
    def state_shapes(
        spec: RgLruSpec, embed_dim: int, mesh: Mesh, dtype: jnp.dtype, num_slots: int
    ) -> tuple[jax.ShapeDtypeStruct, ...]:
        """The inputs of the convolution [num_slots, K-1, B, W] and the states [num_slots, B, W]."""
        inputs = (num_slots, spec.conv_kernel - 1, spec.num_blocks, spec.block_dim)
        states = (num_slots, spec.num_blocks, spec.block_dim)
        return (
            state_shape(mesh, inputs, (None, None, "channels", None), dtype),
            state_shape(mesh, states, (None, "channels", None), _FLOAT32),
        )

    def __call__(
        self, h_te: jax.Array, states: States, batch: RaggedBatch
    ) -> tuple[jax.Array, States]:
        """[T, E] -> [T, E] or [S, T, E] partial sums, and the states after the batch."""
        dtype = product_dtype(self.mesh, h_te.dtype)
        projected = linear(h_te, self.in_proj[...], dtype)  # [T, B, 2, W]
        projected += self.in_bias[...].astype(dtype)
        blocks, slots = (None, "channels"), (None, None, "channels")
        recur_blocks = on_each_device(
            self.mesh,
            _recur_blocks,
            (blocks, blocks, *[("channels",)] * 4, slots, blocks, (), ()),
            (blocks, slots, blocks),
        )
        y_tbw, *states = recur_blocks(
            projected[:, :, 1],
            self.conv[...],
            self.conv_bias[...],
            self.gates[...],
            self.gate_bias[...],
            self.decay[...],
            *states,
            batch.positions == 0,
            StateRows.of(batch),
        )
        gate = ACTIVATION_FUNCTIONS[self.spec.activation](projected[:, :, 0].astype(jnp.float32))
        hidden = (y_tbw * gate).astype(h_te.dtype)
        out = project_out(self.mesh, hidden, self.out_proj[...], self.out_bias[...])
        return out, tuple(states)


def _recur_blocks(
    x: jax.Array,
    conv: jax.Array,
    conv_bias: jax.Array,
    gates: jax.Array,
    gate_bias: jax.Array,
    decay: jax.Array,
    conv_states: jax.Array,
    states: jax.Array,
    begins_t: jax.Array,
    rows: StateRows,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Convolution, gates and recurrence of a device's blocks: [T, B, W] to [T, B, W], and their states."""
    x_tbw, conv_states = causal_conv(x, conv, conv_bias, conv_states, rows)
    products = jnp.einsum(
        "tbw,bgwv->gtbv",
        x_tbw.astype(gates.dtype),
        gates,
        precision=matmul_precision(gates.dtype),
        preferred_element_type=jnp.float32,
    )
    gate_bias = jnp.moveaxis(gate_bias.astype(jnp.float32), 1, 0)[:, None]
    input_gate, recurrent_gate = jax.nn.sigmoid(products + gate_bias)
    log_decay = _SHARPNESS * recurrent_gate * jax.nn.softplus(decay)
    # A request's first token comes in as it is.
    norm = jnp.where(begins_t[:, None, None], 1, jnp.sqrt(1 - jnp.exp(2 * log_decay)))
    inputs = jnp.exp(log_decay), x_tbw * input_gate * norm

    def step(inputs, h):
        h = inputs[0] * h + inputs[1]
        return h, h

    def chunk(inputs, counted, h):
        counted = counted[:, None, None]
        h_tbw = linear_recurrence(
            jnp.where(counted, inputs[0], 1), jnp.where(counted, inputs[1], 0), h
        )
        return h_tbw, h_tbw[-1]

    y_tbw, states = recur(step, chunk, _CHUNK, inputs, states, rows)
    return y_tbw, conv_states, states
