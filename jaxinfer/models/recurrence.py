"""Recurrences over a ragged batch: each row goes on from the state that its request left in a slot."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

from jaxinfer.models.batch import RaggedBatch

Arrays = Any
"""A pytree of arrays with one leading axis in common."""

Step = Callable[[Arrays, Arrays], tuple[Arrays, Arrays]]
"""One token of each of R rows: inputs [R, ...] and states [R, ...] to outputs [R, ...] and states."""

Chunk = Callable[[Arrays, jax.Array, Arrays], tuple[Arrays, Arrays]]
"""C tokens of one row: inputs [C, ...], which of them count [C] and a state [...] to outputs [C, ...] and the state
after those that count, which stand next to each other."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StateRows:
    """Where the R rows of a batch keep their states. The last slot is padding's: what is written there counts nowhere."""

    slots: jax.Array
    """[R] int32"""
    fresh: jax.Array
    """[R] bool: the row's tokens are its request's first. What the slot holds was left by another request."""
    starts: jax.Array
    """[R+1] int32, the first token of each row."""
    decode_only: bool = field(metadata={"static": True})

    @classmethod
    def of(cls, batch: RaggedBatch) -> StateRows:
        starts = batch.query_start_loc
        first = batch.seq_lens - (1 if batch.decode_only else starts[1:] - starts[:-1])
        return cls(batch.state_slots, first <= 0, starts, batch.decode_only)


def recur(
    step: Step, chunk: Chunk, chunk_size: int, inputs: Arrays, states: Arrays, rows: StateRows
) -> tuple[Arrays, Arrays]:
    """Inputs [T, ...] to outputs [T, ...], and `states` [S, ...] with those of the rows after their tokens.

    Rows of one token advance together; those of more do so one after another, `chunk_size` tokens at a time, as many
    times as this batch needs. So of all that lives inside a layer only R states exist at once, and whatever `chunk`
    makes of its tokens.
    """
    if rows.decode_only:
        return _step_rows(step, inputs, states, rows.slots, rows.fresh)
    num_tokens, counts = len(jax.tree.leaves(inputs)[0]), rows.starts[1:] - rows.starts[:-1]
    # Rows of one token come first: token n is row n's.
    N, padding = min(num_tokens, len(counts)), len(jax.tree.leaves(states)[0]) - 1
    single = counts[:N] == 1
    outputs, states = _step_rows(
        step,
        jax.tree.map(lambda x: x[:N], inputs),
        states,
        jnp.where(single, rows.slots[:N], padding),
        rows.fresh[:N] | ~single,
    )
    outputs = jax.tree.map(
        lambda x: jnp.pad(x, [(0, num_tokens - N)] + [(0, 0)] * (x.ndim - 1)), outputs
    )

    size = min(chunk_size, num_tokens)
    num_chunks = jnp.where(counts > 1, -(-counts // size), 0)
    ends = jnp.cumsum(num_chunks)

    def advance(i: jax.Array, carry: tuple[Arrays, Arrays]) -> tuple[Arrays, Arrays]:
        outputs, states = carry
        row = jnp.searchsorted(ends, i, side="right")
        nth = i - (ends[row] - num_chunks[row])
        first = rows.starts[row] + nth * size
        end = jnp.minimum(first + size, rows.starts[row + 1])
        # A window of the batch's last tokens where so many don't follow: then the chunk's own are not its first.
        begin = jnp.minimum(first, num_tokens - size)
        token = begin + jnp.arange(size)
        counted = (token >= first) & (token < end)
        begins, slot = rows.fresh[row] & (nth == 0), rows.slots[row]
        before = jax.tree.map(lambda s: jnp.where(begins, jnp.zeros_like(s[slot]), s[slot]), states)
        window = jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, begin, size), inputs)
        out, after = chunk(window, counted, before)

        def place(all_out: jax.Array, new: jax.Array) -> jax.Array:
            old = jax.lax.dynamic_slice_in_dim(all_out, begin, size)
            new = jnp.where(counted.reshape(-1, *[1] * (new.ndim - 1)), new, old)
            return jax.lax.dynamic_update_slice_in_dim(all_out, new, begin, 0)

        outputs = jax.tree.map(place, outputs, out)
        return outputs, jax.tree.map(lambda s, new: s.at[slot].set(new), states, after)

    return jax.lax.fori_loop(0, ends[-1], advance, (outputs, states))


def _step_rows(
    step: Step, inputs: Arrays, states: Arrays, slots: jax.Array, fresh: jax.Array
) -> tuple[Arrays, Arrays]:
    before = jax.tree.map(lambda s: _unless(fresh, s[slots]), states)
    outputs, after = step(inputs, before)
    return outputs, jax.tree.map(lambda s, new: s.at[slots].set(new), states, after)


def _unless(rows: jax.Array, x: jax.Array) -> jax.Array:
    """`x` [R, ...] with zeros in these `rows` [R], whatever it holds there."""
    return jnp.where(rows.reshape(-1, *[1] * (x.ndim - 1)), jnp.zeros_like(x), x)


def causal_conv(
    x: jax.Array,
    weight: jax.Array,
    bias: jax.Array | None,
    states: jax.Array,
    rows: StateRows,
) -> tuple[jax.Array, jax.Array]:
    """A convolution of each channel over a row's last K tokens: [T, *D] to float32 [T, *D].

    Args:
        weight: [K, *D], the one of the token itself last. `bias`: [*D].
        states: [S, K-1, *D], the inputs that came last, of the dtype in which they are convolved. Returned after the
            rows' tokens.
    """
    x, weight = x.astype(states.dtype), weight.astype(jnp.float32)
    K, before = len(weight), _unless(rows.fresh, states[rows.slots])
    if rows.decode_only:
        window = jnp.concatenate([before, x[:, None]], axis=1)  # [R, K, *D]
        out = (window.astype(jnp.float32) * weight).sum(axis=1)
        after = window[:, 1:]
    else:
        T, starts, counts = len(x), rows.starts[:-1], rows.starts[1:] - rows.starts[:-1]
        token = jnp.arange(T)
        row = jnp.searchsorted(rows.starts[1:], token, side="right").clip(max=len(starts) - 1)
        offset = token - starts[row]
        out = x.astype(jnp.float32) * weight[K - 1]
        for back in range(1, K):
            shifted = jnp.concatenate([jnp.zeros_like(x[:back]), x])[:T]
            earlier = before[row, (K - 1 - back + offset).clip(max=K - 2)]
            here = (offset >= back).reshape(-1, *[1] * (x.ndim - 1))
            out += jnp.where(here, shifted, earlier).astype(jnp.float32) * weight[K - 1 - back]
        place = (
            counts[:, None] - (K - 1) + jnp.arange(K - 1)
        )  # in the row's own tokens, negative: before them
        new = x[(starts[:, None] + place).clip(0, T - 1)]
        old = jnp.take_along_axis(
            before, (K - 1 + place).clip(0, K - 2).reshape(*place.shape, *[1] * (x.ndim - 1)), 1
        )
        after = jnp.where((place >= 0).reshape(*place.shape, *[1] * (x.ndim - 1)), new, old)
    if bias is not None:
        out += bias.astype(jnp.float32)
    return out, states.at[rows.slots].set(after)
