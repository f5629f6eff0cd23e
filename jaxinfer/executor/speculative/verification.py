"""Which guesses hold, from what is sampled after each of them.

A step with drafts samples at N positions: after each row's last token and after each of its drafts, one draft at a time
being taken for granted. Position n of a row samples x[n] from p[n], the target's distribution there, as if the drafts
before it were the output; draft d[n] comes next.

Leviathan et al. 2023 and Chen et al. 2023 accept d with probability min(1, p(d) / q(d)) and otherwise draw from
norm(max(p - q, 0)). Where d is certain given the past (n-grams, greedy drafters), q is 1 at d: accepting has probability
p(d), and what is drawn otherwise is p without d. That is drawing x from p and accepting d where x == d, x being the
other token where not. So the draws of such a step are those of a step without drafts, with the same seeds at the same
positions: the tokens are the same whatever is drafted.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.engine.plan import Drafts, Int32
from jaxinfer.executor.sampling_rows import MAX_COUNT

NO_DRAFT = -1


class DraftedPositions(NamedTuple):
    """Of N positions, those of a row next to each other: the draft that comes next, `NO_DRAFT` after a row's last one;
    how many of the row's drafts come before, at most K; and where drafts are drawn, what the next one was drawn with."""

    next_drafts: jax.Array  # [N] int32
    num_before: jax.Array  # [N] int32
    probs: jax.Array | None = None  # [N, V] float32

    def earlier(self, num_drafts: int) -> tuple[jax.Array, jax.Array]:
        """Index [N, K] of the positions 1 to K before each, and whether it is the same row's."""
        back = jnp.arange(1, num_drafts + 1)
        index = jnp.arange(len(self.next_drafts))[:, None] - back
        return jnp.maximum(index, 0), back <= self.num_before[:, None]


def emitted(
    token_ids: jax.Array, invalid: jax.Array, drafted: DraftedPositions, num_drafts: int
) -> tuple[jax.Array, jax.Array]:
    """Which of the positions' `token_ids` [N] are output, and which of these are their rows' last.

    A draft holds where it was sampled, and something can be sampled after it (`invalid` [N]: it can't); else the row
    goes on from the draft in the next step, which finds out why.
    """
    follows = jnp.concatenate([~invalid[1:], jnp.zeros(1, bool)])
    holds = (token_ids == drafted.next_drafts) & ~invalid & follows
    index, same_row = drafted.earlier(num_drafts)
    out = jnp.all(holds[index] | ~same_row, axis=1)
    return out, out & ~holds


def with_drafts(states: jax.Array, drafted: DraftedPositions, num_drafts: int) -> jax.Array:
    """Token states [N, V] (see `sampling_rows.PROMPT_BIT`) that count the drafts before each position as output."""
    index, same_row = drafted.earlier(num_drafts)
    ids = jnp.where(same_row, drafted.next_drafts[index], states.shape[1])
    rows = jnp.arange(len(ids))[:, None]
    return _count(states, rows, ids, num_drafts)


def count_emitted(
    tokens: jax.Array, rows: jax.Array, token_ids: jax.Array, out: jax.Array, num_drafts: int
) -> jax.Array:
    """Count `token_ids` [N] as output of `rows` [N] where `out` [N]; `tokens` [S, V] is updated in place when donated.
    A row may come up to K + 1 times."""
    return _count(tokens, jnp.where(out, rows, tokens.shape[0]), token_ids, num_drafts + 1)


def _count(states: jax.Array, rows: jax.Array, ids: jax.Array, most: int) -> jax.Array:
    """Add 1 at each of `ids` in `rows`, up to `most` times in all at the same place, short of overflow."""
    now = states.at[rows, ids].get(mode="clip") & MAX_COUNT
    step = (now < MAX_COUNT - most).astype(states.dtype)
    return states.at[rows, ids].add(step, mode="drop")


class StepPositions(NamedTuple):
    """The host's view of the N positions at which a plan of R rows samples."""

    counts: Int32
    """[R]: 1 + the row's drafts."""
    starts: Int32
    """[R]: where the row's positions begin."""
    rows: Int32
    """[N], index into the plan's rows."""
    next_drafts: Int32
    """[N]"""
    num_before: Int32
    """[N]"""

    @classmethod
    def of(cls, drafts: Drafts) -> StepPositions:
        counts = drafts.num_drafts + 1
        starts = np.cumsum(counts) - counts
        rows = np.repeat(np.arange(len(counts)), counts)
        num_before = np.arange(len(rows)) - starts[rows]
        next_drafts = np.full(len(rows), NO_DRAFT, np.int32)
        next_drafts[num_before < drafts.num_drafts[rows]] = drafts.token_ids
        return cls(counts, starts, rows, next_drafts, num_before)

    def num_emitted(self, token_ids: Int32, invalid_token: int) -> Int32:
        """How many of each row's `token_ids` [N] are output, as `emitted` says; at least 1."""
        valid = token_ids != invalid_token
        holds = (token_ids == self.next_drafts) & valid & np.append(valid[1:], False)
        n = np.arange(len(token_ids))
        last = np.minimum.reduceat(np.where(holds, len(n), n), self.starts)
        return (last - self.starts + 1).astype(np.int32)
