"""Which requests of a batch share their first pages, and what that makes of their lengths and tables."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp


class SharedPrefixes(NamedTuple):
    """C groups of requests. The requests of a group are neighbours, and their contexts begin with the same pages.

    Requests whose tokens come after those of the last group share nothing; neither do those of a group of length 0.
    All tokens of a group's requests come after the shared ones.
    """

    block_tables: jax.Array
    """[C, P] int32, the shared pages of each group in order; entries past its length must be valid page numbers."""
    lens: jax.Array
    """[C] int32, shared tokens of each group: whole pages."""
    query_start_loc: jax.Array
    """[C + 1] int32: group c owns the tokens query_start_loc[c] up to query_start_loc[c + 1], the first one token 0;
    unused groups repeat the number of tokens in groups."""


def prefix_lens_of(first_token: jax.Array, prefixes: SharedPrefixes) -> jax.Array:
    """How many tokens the request whose tokens begin at `first_token` [R] shares: [R]."""
    group = jnp.sum(
        prefixes.query_start_loc[None, 1:] <= first_token[:, None], axis=1, dtype=jnp.int32
    )
    return jnp.pad(prefixes.lens, (0, 1))[group]


def skip_pages(block_tables: jax.Array, num_pages: jax.Array) -> jax.Array:
    """Each row of `block_tables` [R, P] without its first `num_pages` [R] entries, filled up with valid ones."""
    last = block_tables.shape[1] - 1
    column = jnp.arange(last + 1, dtype=jnp.int32)[None, :] + num_pages[:, None]
    return jnp.take_along_axis(block_tables, jnp.minimum(column, last), axis=1)


def split_prefixes(
    prefixes: SharedPrefixes, num_tokens: int, num_splits: int, page_size: int
) -> SharedPrefixes:
    """Groups for the batch's tokens repeated `num_splits` times, each copy with a piece of every prefix.

    The pieces of a prefix are whole pages, as equal as can be. Tokens of no group form a group of length 0 in each
    copy: (C + 1) * num_splits groups in all.
    """
    pages = prefixes.lens // page_size
    pages_per_piece = (pages + num_splits - 1) // num_splits
    tables, lens, starts = [], [], []
    for i in range(num_splits):
        tables.append(skip_pages(prefixes.block_tables, i * pages_per_piece))
        tables.append(jnp.zeros_like(prefixes.block_tables[:1]))
        piece = jnp.clip(pages - i * pages_per_piece, 0, pages_per_piece)
        lens.append(jnp.pad(piece * page_size, (0, 1)))
        starts.append(prefixes.query_start_loc + i * num_tokens)
    starts.append(jnp.full(1, num_splits * num_tokens, jnp.int32))
    return SharedPrefixes(*map(jnp.concatenate, (tables, lens, starts)))
