"""Gated convolutions over the last few tokens, as LFM2 has them in most of its layers."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from jaxinfer.models.batch import RaggedBatch
from jaxinfer.models.layers import leaf, linear, product_dtype
from jaxinfer.models.recurrence import StateRows, causal_conv
from jaxinfer.models.state_layers import (
    States,
    on_each_device,
    project_out,
    shared_channels,
    state_shape,
)
from jaxinfer.models.state_spec import ShortConvSpec


class ShortConv(nnx.Module):
    """c * conv(b * x), each a projection of the token; channels are cut along the mesh."""

    def __init__(self, spec: ShortConvSpec, embed_dim: int, mesh: Mesh, dtype: jnp.dtype):
        E = D = shared_channels(embed_dim, mesh)
        self.spec, self.mesh = spec, mesh
        self.in_proj = leaf((D, 3, E), ("channels", None, "embed"), dtype)
        self.conv = leaf((spec.conv_kernel, D), (None, "channels"), dtype)
        self.out_proj = leaf((E, D), ("embed", "channels"), dtype)
        if spec.bias:
            self.in_bias = leaf((D, 3), ("channels", None), dtype)
            self.conv_bias = leaf((D,), ("channels",), dtype)
            self.out_bias = leaf((E,), ("embed",), dtype)

    @staticmethod
    def state_shapes(
        spec: ShortConvSpec, embed_dim: int, mesh: Mesh, dtype: jnp.dtype, num_slots: int
    ) -> tuple[jax.ShapeDtypeStruct, ...]:
        """The inputs of the convolution [num_slots, K-1, E]."""
        shape = (num_slots, spec.conv_kernel - 1, embed_dim)
        return (state_shape(mesh, shape, (None, None, "channels"), dtype),)

    def __call__(
        self, h_te: jax.Array, states: States, batch: RaggedBatch
    ) -> tuple[jax.Array, States]:
        """[T, E] -> [T, E] or [S, T, E] partial sums, and the states after the batch."""
        projected = linear(h_te, self.in_proj[...], product_dtype(self.mesh, h_te.dtype))
        has_bias = self.spec.bias
        if has_bias:
            projected += self.in_bias[...].astype(projected.dtype)
        b, c, x = (projected[..., i].astype(jnp.float32) for i in range(3))
        channels, slots = (None, "channels"), (None, None, "channels")
        convolve = on_each_device(
            self.mesh,
            causal_conv,
            (channels, channels, ("channels",), slots, ()),
            (channels, slots),
        )
        conv_bias = self.conv_bias[...] if has_bias else None
        y_td, conv_states = convolve(
            b * x, self.conv[...], conv_bias, states[0], StateRows.of(batch)
        )
        out_bias = self.out_bias[...] if has_bias else None
        hidden = (c * y_td).astype(h_te.dtype)
        return project_out(self.mesh, hidden, self.out_proj[...], out_bias), (conv_states,)
