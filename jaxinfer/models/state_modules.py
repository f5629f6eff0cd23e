"""Which module runs a layer with states."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxinfer.models.delta_net import DeltaNet
from jaxinfer.models.kimi_delta import KimiDelta
from jaxinfer.models.mamba import Mamba, Mamba2
from jaxinfer.models.rg_lru import RgLru
from jaxinfer.models.short_conv import ShortConv
from jaxinfer.models.state_spec import (
    DeltaNetSpec,
    KimiDeltaSpec,
    Mamba2Spec,
    MambaSpec,
    RgLruSpec,
    ShortConvSpec,
    StateSpec,
)

StateLayer = Mamba | Mamba2 | DeltaNet | KimiDelta | ShortConv | RgLru

_MODULES: dict[type[StateSpec], type[StateLayer]] = {
    MambaSpec: Mamba,
    Mamba2Spec: Mamba2,
    DeltaNetSpec: DeltaNet,
    KimiDeltaSpec: KimiDelta,
    ShortConvSpec: ShortConv,
    RgLruSpec: RgLru,
}


def make_state_layer(spec: StateSpec, embed_dim: int, mesh: Mesh, dtype: jnp.dtype) -> StateLayer:
    return _MODULES[type(spec)](spec, embed_dim, mesh, dtype)


def state_shapes(
    spec: StateSpec, embed_dim: int, mesh: Mesh, dtype: jnp.dtype, num_slots: int
) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Shape, dtype and sharding of a layer's states, [num_slots, ...] each."""
    return _MODULES[type(spec)].state_shapes(spec, embed_dim, mesh, dtype, num_slots)
