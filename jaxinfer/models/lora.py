"""What the low-rank updates of many adapters (LoRA, arXiv 2106.09685) add to a layer's matmuls, in one batch."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import prod

import jax
import jax.numpy as jnp

from jaxinfer.models.layers import matmul_precision


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class LowRankStack:
    """The adapters in L slots, of rank r each (smaller ones are filled up with zeros), for one leaf [*out, *in] that is
    made of N of a checkpoint's matrices: one, or several that a product has next to each other along `axis` of `out`
    (queries, keys and values; gate and up)."""

    a: jax.Array
    """[N, L, r, *in]"""
    b: tuple[jax.Array, ...]
    """N of [L, r, *out], each with its own part of `axis`; the adapter's scale is in it."""
    axis: int = field(metadata={"static": True})


AdapterStacks = tuple[dict[str, LowRankStack], ...]
"""For each layer, by "attention." or "mlp." and the leaf's name."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class LayerAdapters:
    """What a layer's module gets: its stacks by leaf, and each token's slot [T] int32, 0 for none, s for place s - 1 in
    the stacks."""

    stacks: dict[str, LowRankStack]
    slots: jax.Array

    def of_module(self, name: str) -> LayerAdapters:
        prefix = f"{name}."
        own = {
            leaf.removeprefix(prefix): stack
            for leaf, stack in self.stacks.items()
            if leaf.startswith(prefix)
        }
        return LayerAdapters(own, self.slots)


def has_updates(adapters: LayerAdapters | None, leaf: str) -> bool:
    return adapters is not None and leaf in adapters.stacks


def add_updates(
    product: jax.Array, adapters: LayerAdapters | None, leaf: str, x: jax.Array
) -> jax.Array:
    """`product` [T, *out], which is `x` [T, *in] times the leaf, plus x·Aᵀ·Bᵀ of each token's own adapter.

    Two dense matmuls for all slots at once, and in between zeros for the slots that aren't the token's: what a token
    gets doesn't depend on the adapters of others, as a zero adds nothing. An adapter must be finite for that.
    """
    if adapters is None or leaf not in adapters.stacks:
        return product
    stack = adapters.stacks[leaf]
    (N, L, r), T = stack.a.shape[:3], len(x)
    precision = matmul_precision(stack.a.dtype)
    hidden = jax.lax.dot_general(
        x.reshape(T, -1).astype(stack.a.dtype),
        stack.a.reshape(N * L * r, -1),
        (((1,), (1,)), ((), ())),
        precision=precision,
        preferred_element_type=jnp.float32,
    )
    own_tl = adapters.slots[:, None] == jnp.arange(1, L + 1, dtype=jnp.int32)
    hidden = jnp.where(own_tl[:, None, :, None], hidden.reshape(T, N, L, r), 0)
    hidden = hidden.astype(stack.a.dtype)
    updates = []
    for n, b in enumerate(stack.b):
        out = b.shape[2:]
        update = jax.lax.dot_general(
            hidden[:, n].reshape(T, L * r),
            b.reshape(L * r, prod(out)),
            (((1,), (0,)), ((), ())),
            precision=precision,
            preferred_element_type=product.dtype,
        )
        updates.append(update.reshape(T, *out))
    update = updates[0] if N == 1 else jnp.concatenate(updates, axis=1 + stack.axis)
    return product + update
