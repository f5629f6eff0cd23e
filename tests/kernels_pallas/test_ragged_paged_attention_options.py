"""Sinks, log-sum-exp, whole contexts and 8-bit caches against the float64 oracle, alone and combined."""

import itertools

import pytest

from tests.kernels_pallas.paged_batches import (
    Geometry,
    check,
    make_batch,
)

VISIBILITY = (
    {},
    {"causal": False},
    {"sliding_window": 37},
)
COMBINATIONS = tuple(
    Geometry(16, 2, 2, 16, soft_cap=soft_cap, sinks=sinks, kv_dtype=kv_dtype, **visibility)
    for kv_dtype, sinks, soft_cap, visibility in itertools.product(
        (None, "float8_e4m3fn", "int8"), (False, True), (None, 2.0), VISIBILITY
    )
)
ROWS = [(83, 1), (700, 1), (97, 97), (300, 5), (0, 0), (161, 30)]


def batch_of(geometry, rows, *, tokens=160, longest=700, seed=0):
    pages = -(-longest // geometry.page_size) + 1
    return make_batch(
        geometry,
        rows,
        tokens=tokens,
        pages_per_row=pages,
        num_pages=sum(-(-n // geometry.page_size) for n, _ in rows) + 2,
        seed=seed,
    )


@pytest.mark.parametrize("geometry", COMBINATIONS, ids=str)
def test_every_combination(geometry):
    check(batch_of(geometry, ROWS), geometry, "float32", return_lse=True)
