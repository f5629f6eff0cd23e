"""Which token a drafter's logits stand for: the most likely one, or one drawn as the request would draw it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxinfer.executor.categorical import draw, uniform_pair
from jaxinfer.executor.sampler import argmax, row_filter
from jaxinfer.executor.sampling_rows import SEED_HIGH, SEED_LOW
from jaxinfer.executor.speculative.drafter import Proposal
from jaxinfer.executor.token_filter import BLOCK, block_maxima

NO_DRAFT = -1
_STREAM = 0x5DEECE66
"""Tells the randomness of a row's drafts from that of its tokens, which its seed gives too."""


class Drawn(NamedTuple):
    """Drafts of R rows: `token_ids` [R] int32, `NO_DRAFT` where there is none, and where they were drawn the
    probabilities [R, V] float32 that they were drawn with."""

    token_ids: jax.Array
    probs: jax.Array | None

    def mapped(self, target_ids: jax.Array, vocab_size: int) -> Drawn:
        """The same in the target's vocabulary: draft token i is `target_ids[i]`."""
        known = self.token_ids >= 0
        token_ids = jnp.where(known, target_ids[self.token_ids], NO_DRAFT)
        if self.probs is None:
            return Drawn(token_ids, None)
        zeros = jnp.zeros((len(token_ids), vocab_size), jnp.float32)
        return Drawn(token_ids, zeros.at[:, target_ids].set(self.probs, mode="drop"))


def joined(drawn: Drawn) -> Proposal:
    """Drafts [K, R] of K positions, row by row."""
    probs = None if drawn.probs is None else drawn.probs.transpose(1, 0, 2)
    return Proposal(drawn.token_ids.T, probs)


@dataclass(frozen=True)
class DraftChoice:
    """`random`: rows that sample at random have their drafts drawn, with their own temperature and filters, from
    randomness that their sampling doesn't use; the others, and all rows without it, get the most likely token."""

    random: bool

    def draw(
        self, logits: jax.Array, sampling: jax.Array, positions: jax.Array, possible: jax.Array
    ) -> Drawn:
        """A draft for each row.

        Args:
            logits: [R, V] float32.
            sampling: [R, …] the rows' parameters, as in `DraftStep`.
            positions: [R] of the drafts in their sequences.
            possible: [R] the rows that get one.
        """
        V = logits.shape[1]
        x = jnp.pad(logits, ((0, 0), (0, -V % BLOCK)), constant_values=-jnp.inf)
        maxima = block_maxima(x)
        token_ids = jnp.minimum(argmax(x, maxima), V - 1)
        probs = None
        if self.random:
            weights = _weights(x, maxima, token_ids, sampling)
            probs = (weights / jnp.sum(weights, axis=1, keepdims=True))[:, :V]
            seed = sampling[:, SEED_HIGH] ^ _STREAM, sampling[:, SEED_LOW]
            drawn = draw(lambda w, _: w, weights, uniform_pair(*seed, positions))
            token_ids = jnp.where(drawn < V, drawn, token_ids)
        return Drawn(jnp.where(possible, token_ids, NO_DRAFT), probs)


def _weights(
    logits: jax.Array, maxima: jax.Array, likeliest: jax.Array, sampling: jax.Array
) -> jax.Array:
    """[R, V], proportional to what a row's tokens are drawn with; of a greedy row, 1 for the likeliest."""
    random, temperature, kept = row_filter(logits, maxima, sampling)
    index = jax.lax.broadcasted_iota(jnp.int32, logits.shape, 1)
    peak = jnp.max(maxima, axis=1)[:, None]
    weights = jnp.where(
        kept.keeps(logits, index), jnp.exp((logits - peak) / temperature[:, None]), 0
    )
    return jnp.where(random[:, None], weights, (index == likeliest[:, None]).astype(jnp.float32))
