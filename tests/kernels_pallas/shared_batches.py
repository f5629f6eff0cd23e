"""Random batches of requests that share their first pages."""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np

from kernels_pallas import SharedPrefixes
from tests.kernels_pallas.paged_batches import Batch, Geometry, make_batch

NUM_ROWS, NUM_GROUPS, MAX_PAGES = 9, 3, 8


@dataclass(frozen=True)
class Group:
    """`num_pages` shared pages, and per row (tokens of its own, query tokens)."""

    num_pages: int
    rows: tuple[tuple[int, int], ...]


def shared_batch(
    geometry: Geometry,
    groups: list[Group],
    alone: list[tuple[int, int]],
    *,
    tokens: int,
    seed: int,
    num_rows: int = NUM_ROWS,
) -> tuple[Batch, SharedPrefixes]:
    """A batch in which the first rows are those of `groups`, then rows of (tokens, query tokens) by themselves. Pages
    that nobody holds are NaN."""
    size = geometry.page_size
    rows = [(g.num_pages * size + own, queries) for g in groups for own, queries in g.rows]
    batch = make_batch(
        geometry,
        rows + alone,
        tokens=tokens,
        pages_per_row=MAX_PAGES,
        num_pages=num_rows * MAX_PAGES + 2,
        seed=seed,
        num_rows=num_rows,
    )
    tables = np.full((NUM_GROUPS, MAX_PAGES), batch.block_tables[-1, -1], np.int32)
    lens = np.zeros(NUM_GROUPS, np.int32)
    starts = np.zeros(NUM_GROUPS + 1, np.int32)
    first = 0
    for c, group in enumerate(groups):
        last, count = first + len(group.rows), group.num_pages
        left = batch.block_tables[first + 1 : last, :count].ravel()
        if geometry.kv_dtype is None:
            batch.k_pages[left] = batch.v_pages[left] = np.nan
        batch.block_tables[first:last, :count] = batch.block_tables[first, :count]
        tables[c, :count] = batch.block_tables[first, :count]
        lens[c] = count * size
        first = last
        starts[c + 1] = batch.query_start_loc[first]
    starts[len(groups) + 1 :] = starts[len(groups)]
    return batch, SharedPrefixes(*map(jnp.asarray, (tables, lens, starts)))
