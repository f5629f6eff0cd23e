"""A logits processor that the engine core's process finds by its name."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxinfer import LogitsProcessor, RowState


def _boost(logits: jax.Array, state: RowState) -> jax.Array:
    token = state.parameters["token"].astype(jnp.int32)
    return logits.at[jnp.arange(logits.shape[0]), token].add(100.0)


boost = LogitsProcessor(_boost, ["token"])
