"""State-space layers: the selective scan with its convolution and gate, by channel (Mamba) and by head (Mamba-2)."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from jaxinfer.models.batch import RaggedBatch
from jaxinfer.models.layers import constrain, leaf, linear, product_dtype, scaled
from jaxinfer.models.mlp import ACTIVATION_FUNCTIONS
from jaxinfer.models.recurrence import StateRows, causal_conv
from jaxinfer.models.selective_scan import HeadScanInputs, ScanInputs, head_scan, selective_scan
from jaxinfer.models.sharded_groups import ShardedGroups
from jaxinfer.models.state_layers import (
    States,
    on_each_device,
    project_out,
    shared_channels,
    state_shape,
)
from jaxinfer.models.state_spec import Mamba2Spec, MambaSpec
from jaxinfer.parallel.mesh import tensor_parallel_size

_FLOAT32 = jnp.dtype(jnp.float32)


class Mamba(nnx.Module):
    """Channels are cut along the mesh; what all of them depend on is added up over it once."""

    def __init__(self, spec: MambaSpec, embed_dim: int, mesh: Mesh, dtype: jnp.dtype):
        E, D, N, R = embed_dim, spec.inner_dim, spec.state_dim, spec.step_rank
        shared_channels(D, mesh)
        self.spec, self.mesh = spec, mesh
        self.in_proj = leaf((D, 2, E), ("channels", None, "embed"), dtype)
        self.conv = leaf((spec.conv_kernel, D), (None, "channels"), dtype)
        self.x_proj = leaf((R + 2 * N, D), (None, "channels"), dtype)
        self.dt_proj = leaf((D, R), ("channels", None), dtype)
        self.dt_bias = leaf((D,), ("channels",), _FLOAT32)
        self.a_log = leaf((D, N), ("channels", None), _FLOAT32)
        self.d = leaf((D,), ("channels",), _FLOAT32)
        self.out_proj = leaf((E, D), ("embed", "channels"), dtype)
        if spec.conv_bias:
            self.conv_bias = leaf((D,), ("channels",), dtype)
        if spec.bias:
            self.in_bias = leaf((D, 2), ("channels", None), dtype)
            self.out_bias = leaf((E,), ("embed",), dtype)
        if spec.step_norms == "weighted":
            self.dt_norm = leaf((R,), (None,), dtype)
            self.b_norm = leaf((N,), (None,), dtype)
            self.c_norm = leaf((N,), (None,), dtype)

    @staticmethod
    def state_shapes(
        spec: MambaSpec, embed_dim: int, mesh: Mesh, dtype: jnp.dtype, num_slots: int
    ) -> tuple[jax.ShapeDtypeStruct, ...]:
        """The inputs of the convolution [num_slots, K-1, D] and the states [num_slots, D, N]."""
        K, D, N = spec.conv_kernel, spec.inner_dim, spec.state_dim
        return (
            state_shape(mesh, (num_slots, K - 1, D), (None, None, "channels"), dtype),
            state_shape(mesh, (num_slots, D, N), (None, "channels", None), _FLOAT32),
        )

    def __call__(
        self, h_te: jax.Array, states: States, batch: RaggedBatch
    ) -> tuple[jax.Array, States]:
        """[T, E] -> [T, E] or [S, T, E] partial sums, and the states after the batch."""
        spec, mesh, dtype = self.spec, self.mesh, product_dtype(self.mesh, h_te.dtype)
        rows, R, N = StateRows.of(batch), spec.step_rank, spec.state_dim
        projected = linear(h_te, self.in_proj[...], dtype)  # [T, D, 2]
        if spec.bias:
            projected += self.in_bias[...].astype(dtype)
        conv_bias = self.conv_bias[...] if spec.conv_bias else None
        channels = (None, "channels")
        convolve = on_each_device(
            mesh,
            causal_conv,
            (channels, channels, ("channels",), (None, *channels), ()),
            (channels, (None, *channels)),
        )
        x_td, conv_states = convolve(projected[..., 0], self.conv[...], conv_bias, states[0], rows)
        x_td = ACTIVATION_FUNCTIONS[spec.activation](x_td)
        low = linear(x_td.astype(h_te.dtype), self.x_proj[...])
        step, b_tn, c_tn = jnp.split(constrain(low, mesh, (None, None)), (R, R + N), axis=1)
        if spec.step_norms != "none":
            step, b_tn, c_tn = (
                self._normed(x, n) for x, n in ((step, "dt"), (b_tn, "b"), (c_tn, "c"))
            )
        dt_td = linear(step.astype(h_te.dtype), self.dt_proj[...]) + self.dt_bias[...]
        scan = on_each_device(
            mesh,
            lambda x, dt, b, c, a_log, h, rows: selective_scan(
                ScanInputs(x, dt, b, c), -jnp.exp(a_log), h, rows
            ),
            (channels, channels, (), (), ("channels",), channels, ()),
            (channels, channels),
        )
        y_td, scan_states = scan(
            x_td, jax.nn.softplus(dt_td), b_tn, c_tn, self.a_log[...], states[1], rows
        )
        y_td = (y_td + self.d[...] * x_td) * jax.nn.silu(projected[..., 1].astype(jnp.float32))
        out_bias = self.out_bias[...] if spec.bias else None
        out = project_out(mesh, y_td.astype(h_te.dtype), self.out_proj[...], out_bias)
        return out, (conv_states, scan_states)

    def _normed(self, x: jax.Array, name: str) -> jax.Array:
        x = x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + self.spec.norm_eps)
        if self.spec.step_norms == "plain":
            return x
        return x * getattr(self, f"{name}_norm")[...].astype(jnp.float32)


class Mamba2(nnx.Module):
    """Groups of heads are cut along the mesh, each with the rows of the projection that are its own."""

    def __init__(self, spec: Mamba2Spec, embed_dim: int, mesh: Mesh, dtype: jnp.dtype):
        self.groups = ShardedGroups.create(
            spec.num_groups, spec.num_heads, tensor_parallel_size(mesh)
        )
        E, G, Q = embed_dim, self.groups.num_groups, self.groups.heads_per_group
        inner, convolved = Q * spec.head_dim, Q * spec.head_dim + 2 * spec.state_dim
        rows = inner + convolved + Q  # gate, input, two vectors, step
        self.spec, self.mesh = spec, mesh
        self.in_proj = leaf((G, rows, E), ("channels", None, "embed"), dtype)
        self.conv = leaf((spec.conv_kernel, G, convolved), (None, "channels", None), dtype)
        self.dt_bias = leaf((G, Q), ("channels", None), _FLOAT32)
        self.a_log = leaf((G, Q), ("channels", None), _FLOAT32)
        self.d = leaf((G, Q), ("channels", None), _FLOAT32)
        self.out_proj = leaf((E, G, inner), ("embed", "channels", None), dtype)
        if spec.conv_bias:
            self.conv_bias = leaf((G, convolved), ("channels", None), dtype)
        if spec.norm != "none":
            self.norm = leaf((G, inner), ("channels", None), dtype)
        if spec.in_bias:
            self.in_bias = leaf((G, rows), ("channels", None), dtype)
        if spec.out_bias:
            self.out_bias = leaf((E,), ("embed",), dtype)

    @staticmethod
    def state_shapes(
        spec: Mamba2Spec, embed_dim: int, mesh: Mesh, dtype: jnp.dtype, num_slots: int
    ) -> tuple[jax.ShapeDtypeStruct, ...]:
        """The inputs of the convolution [num_slots, K-1, G, Q*P + 2*N] and the states [num_slots, G, Q, P, N]."""
        groups = ShardedGroups.create(spec.num_groups, spec.num_heads, tensor_parallel_size(mesh))
        G, Q, P, N = groups.num_groups, groups.heads_per_group, spec.head_dim, spec.state_dim
        inputs = (num_slots, spec.conv_kernel - 1, G, Q * P + 2 * N)
        return (
            state_shape(mesh, inputs, (None, None, "channels", None), dtype),
            state_shape(
                mesh, (num_slots, G, Q, P, N), (None, "channels", None, None, None), _FLOAT32
            ),
        )

    def __call__(
        self, h_te: jax.Array, states: States, batch: RaggedBatch
    ) -> tuple[jax.Array, States]:
        """[T, E] -> [T, E] or [S, T, E] partial sums, and the states after the batch."""
        spec, mesh, dtype = self.spec, self.mesh, product_dtype(self.mesh, h_te.dtype)
        projected = linear(scaled(h_te, spec.input_scale), self.in_proj[...], dtype)  # [T, G, rows]
        if spec.in_bias:
            projected += self.in_bias[...].astype(dtype)
        if spec.part_scales is not None:
            projected *= self._part_scales(dtype)
        weights = self.conv[...], self.conv_bias[...] if spec.conv_bias else None
        groups, slots = (None, "channels"), (None, None, "channels")
        recur = on_each_device(
            mesh,
            partial(_recur_heads, spec, self.groups.heads_per_group),
            (groups, groups, ("channels",), ("channels",), slots, groups, ()),
            (groups, slots, groups),
        )
        heads = self.a_log[...], self.dt_bias[...], self.d[...]
        y_tgi, conv_states, scan_states = recur(
            projected, weights[0], weights[1], heads, *states, StateRows.of(batch)
        )
        gate = jax.nn.silu(projected[..., : y_tgi.shape[-1]].astype(jnp.float32))
        match spec.norm:
            case "none":
                y_tgi = y_tgi * gate
            case "after_gate":
                y_tgi = self._normed(y_tgi * gate)
            case "before_gate":
                y_tgi = self._normed(y_tgi) * gate
        out_bias = self.out_bias[...] if spec.out_bias else None
        out = project_out(mesh, y_tgi.astype(h_te.dtype), self.out_proj[...], out_bias)
        return scaled(out, spec.out_scale), (conv_states, scan_states)

    def _part_scales(self, dtype: jnp.dtype) -> jax.Array:
        """[rows]"""
        spec, Q = self.spec, self.groups.heads_per_group
        sizes = (Q * spec.head_dim, Q * spec.head_dim, spec.state_dim, spec.state_dim, Q)
        parts = [
            jnp.full(n, scale, dtype) for n, scale in zip(sizes, spec.part_scales, strict=True)
        ]
        return jnp.concatenate(parts)

    def _normed(self, y_tgi: jax.Array) -> jax.Array:
        """The RMS norm of each group's channels, which are one after another in as many copies as the group has."""
        y = y_tgi.reshape(len(y_tgi), self.spec.num_groups, self.groups.copies, -1)
        square = jnp.mean(y * y, axis=(2, 3), keepdims=True)
        y = y * jax.lax.rsqrt(square + self.spec.norm_eps)
        return y.reshape(y_tgi.shape) * self.norm[...].astype(jnp.float32)


def _recur_heads(
    spec: Mamba2Spec,
    heads_per_group: int,
    projected: jax.Array,
    conv: jax.Array,
    conv_bias: jax.Array | None,
    heads: tuple[jax.Array, jax.Array, jax.Array],
    conv_states: jax.Array,
    scan_states: jax.Array,
    rows: StateRows,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Convolution and scan of a device's groups: projected [T, G, rows] to [T, G, Q*P], and their states."""
    a_log, dt_bias, d = heads
    inner = heads_per_group * spec.head_dim
    _, convolved, dt = jnp.split(projected, (inner, 2 * inner + 2 * spec.state_dim), axis=-1)
    convolved, conv_states = causal_conv(convolved, conv, conv_bias, conv_states, rows)
    convolved = ACTIVATION_FUNCTIONS[spec.activation](convolved)
    x, b, c = jnp.split(convolved, (inner, inner + spec.state_dim), axis=-1)
    x = x.reshape(*x.shape[:-1], heads_per_group, spec.head_dim)
    dt = jnp.clip(jax.nn.softplus(dt.astype(jnp.float32) + dt_bias), *spec.step_limits)
    y, scan_states = head_scan(HeadScanInputs(x, dt, b, c), -jnp.exp(a_log), scan_states, rows)
    y = y + d[..., None] * x
    return y.reshape(*y.shape[:2], inner), conv_states, scan_states
