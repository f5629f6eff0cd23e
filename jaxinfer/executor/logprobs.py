"""Log probabilities of chosen tokens and of the likeliest ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

_BLOCK_BYTES = 64 << 20


class TokenLogprobs(NamedTuple):
    """Of N positions: column 0 the chosen token, then the K likeliest, best first, or those that were given; see
    `plan.LogprobArrays`.

    `ranks`: 1 + the number of tokens that are likelier than the chosen one, so the argmax has rank 1 also when it
    ties with others.
    """

    token_ids: jax.Array  # [N, K + 1] int32
    logprobs: jax.Array  # [N, K + 1] float32
    ranks: jax.Array  # [N] int32


def token_logprobs(
    logits: jax.Array,
    chosen: jax.Array,
    num_logprobs: int,
    *,
    normalized: bool = True,
    given: jax.Array | None = None,
) -> TokenLogprobs:
    """Logprobs of `chosen` [N] and of the `num_logprobs` likeliest tokens under `logits` [N, V] float32; the logits
    themselves where they are not to be `normalized`. Tokens `given` [N, at most num_logprobs] take the place of the
    likeliest ones, where they aren't negative."""
    log_total = jnp.zeros((), logits.dtype)
    if normalized:
        peak = jnp.max(logits, axis=1, keepdims=True)
        log_total = peak + jnp.log(jnp.sum(jnp.exp(logits - peak), axis=1, keepdims=True))
    own = jnp.take_along_axis(logits, chosen[:, None], axis=1)
    ranks = 1 + jnp.sum(logits > own, axis=1, dtype=jnp.int32)
    values, ids = lax.top_k(logits, num_logprobs)
    ids = ids.astype(jnp.int32)
    if given is not None:
        G = given.shape[1]
        first = jnp.where(given >= 0, given, ids[:, :G])
        ids = ids.at[:, :G].set(first)
        values = values.at[:, :G].set(jnp.take_along_axis(logits, first, axis=1))
    return TokenLogprobs(
        jnp.concatenate([chosen[:, None], ids], axis=1),
        jnp.concatenate([own, values], axis=1) - log_total,
        ranks,
    )


def prompt_logprobs(
    compute_logits: Callable[[jax.Array], jax.Array],
    hidden: jax.Array,
    target_ids: jax.Array,
    *,
    num_logprobs: int,
    vocab_size: int,
) -> TokenLogprobs:
    """Logprobs of `target_ids` [T], the tokens that follow the positions of `hidden` [T, E].

    `compute_logits` maps [N, E] to [N, V]. Works through the positions in blocks of at most 256 whose logits take at
    most 64 MiB, so T x V is never held at once.
    """
    T, E = hidden.shape
    block = max(8, min(256, _BLOCK_BYTES // (4 * vocab_size)))
    if block >= T:
        return token_logprobs(compute_logits(hidden), target_ids, num_logprobs)
    blocks = -(-T // block)
    pad = blocks * block - T
    hidden = jnp.pad(hidden, ((0, pad), (0, 0))).reshape(blocks, block, E)
    targets = jnp.pad(target_ids, (0, pad)).reshape(blocks, block)
    scored = lax.map(
        lambda part: token_logprobs(compute_logits(part[0]), part[1], num_logprobs),
        (hidden, targets),
    )
    return jax.tree.map(lambda x: x.reshape(blocks * block, *x.shape[2:])[:T], scored)
