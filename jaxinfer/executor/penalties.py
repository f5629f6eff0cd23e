"""Penalties and logit_bias on the device: what they must remember of each row, and how they change logits."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxinfer.executor.sampling_rows import MAX_COUNT


class SamplerArrays(NamedTuple):
    """Device state of S rows. Donate it to each program that takes it and keep what comes back.

    tokens: [S, V] uint16, see `sampling_rows.PROMPT_BIT`.
    bias_ids, bias_values: [S, B] int32 and float32; unused entries have the id V.
    """

    tokens: jax.Array
    bias_ids: jax.Array
    bias_values: jax.Array


def apply_logit_bias(
    logits: jax.Array, rows: jax.Array, bias_ids: jax.Array, bias_values: jax.Array
) -> jax.Array:
    """Add the biases of `rows` [R] to `logits` [R, V]."""
    r = jnp.arange(logits.shape[0])[:, None]
    ids = bias_ids.at[rows].get(mode="clip")
    values = bias_values.at[rows].get(mode="clip")
    return logits.at[r, ids].add(values, mode="drop")


def apply_penalties(
    logits: jax.Array,
    states: jax.Array,
    repetition: jax.Array,
    frequency: jax.Array,
    presence: jax.Array,
) -> jax.Array:
    """Penalize tokens by `states` [R, V] uint16; the penalties are [R].

    The repetition penalty of a token in prompt or output divides a positive logit and multiplies another (Keskar et
    al. 2019, "CTRL"); then frequency per occurrence and presence once are subtracted, for the output's tokens alone,
    as the OpenAI API defines them.
    """
    counts = (states & MAX_COUNT).astype(jnp.float32)
    factor = jnp.where(states > 0, repetition[:, None], 1.0)
    logits = jnp.where(logits > 0, logits / factor, logits * factor)
    logits = logits - frequency[:, None] * counts
    return logits - presence[:, None] * (counts > 0)


def count_tokens(
    tokens: jax.Array, rows: jax.Array, token_ids: jax.Array, active: jax.Array
) -> jax.Array:
    """Count `token_ids` [R] as output of `rows` [R] where `active` [R]; `tokens` [S, V] is updated in place when
    donated. No two active entries may name the same row."""
    rows = jnp.where(active, rows, tokens.shape[0])
    states = tokens.at[rows, token_ids].get(mode="clip")
    step = ((states & MAX_COUNT) < MAX_COUNT).astype(tokens.dtype)
    return tokens.at[rows, token_ids].set(states + step, mode="drop")
