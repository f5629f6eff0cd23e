"""Ragged paged attention against a float64 oracle, on random batches and at its edges."""

import functools

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

from kernels_pallas import ragged_paged_attention
from tests.kernels_pallas.paged_batches import (
    MAX_ROWS,
    Geometry,
    check,
    check_result,
    compiled,
    make_batch,
)

GEOMETRIES = (
    Geometry(16, 3, 3, 64),
    Geometry(4, 1, 4, 16, sliding_window=37),
    Geometry(32, 2, 1, 32, sliding_window=100, soft_cap=3.0),
    Geometry(16, 2, 2, 32, soft_cap=2.0),
)


decode_rows = st.lists(st.integers(1, 300).map(lambda n: (n, 1)), max_size=MAX_ROWS)


@st.composite
def mixed_rows(draw):
    rows = draw(st.lists(st.integers(1, 300).map(lambda n: (n, 1)), max_size=MAX_ROWS))
    left = 400 - len(rows)
    while len(rows) < MAX_ROWS and draw(st.booleans()):
        query_len = draw(st.integers(2, min(300, left)))
        rows.append((query_len + draw(st.integers(0, 300 - query_len)), query_len))
        left -= query_len
        if left < 2:
            break
    return rows


@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@given(rows=decode_rows, seed=st.integers(0, 2**31))
@settings(max_examples=10, deadline=None)
def test_decode_batches_match_the_oracle(geometry, dtype, rows, seed):
    pages = -(-300 // geometry.page_size) + 1
    batch = make_batch(
        geometry,
        rows,
        tokens=MAX_ROWS,
        pages_per_row=pages,
        num_pages=pages * MAX_ROWS + 2,
        seed=seed,
    )
    check(batch, geometry, dtype, decode_only=True)


@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@given(rows=mixed_rows(), seed=st.integers(0, 2**31))
@settings(max_examples=6, deadline=None)
def test_mixed_batches_match_the_oracle(geometry, dtype, rows, seed):
    pages = -(-300 // geometry.page_size) + 1
    batch = make_batch(
        geometry,
        rows,
        tokens=410,
        pages_per_row=pages,
        num_pages=pages * MAX_ROWS + 2,
        seed=seed,
    )
    check(batch, geometry, dtype)


@pytest.mark.jax_floor
@pytest.mark.parametrize("geometry", GEOMETRIES[:2], ids=str)
def test_chunk_onto_a_long_context(geometry):
    pages = -(-1300 // geometry.page_size)
    batch = make_batch(
        geometry,
        [(1299, 1), (1300, 90), (577, 65)],
        tokens=160,
        pages_per_row=pages,
        num_pages=3 * pages + 2,
        seed=0,
        num_rows=4,
    )
    check(batch, geometry, "float32")


@pytest.mark.jax_floor
def test_half_precision_and_tiny_shapes():
    geometry = Geometry(4, 2, 1, 8)
    batch = make_batch(
        geometry, [(3, 1)], tokens=2, pages_per_row=1, num_pages=3, seed=1, num_rows=2
    )
    check(batch, geometry, "float16", decode_only=True)
    check(batch, geometry, "float16")


@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
def test_reference_backend_matches_the_oracle(geometry):
    batch = make_batch(
        geometry, [(20, 1), (70, 33)], tokens=40, pages_per_row=20, num_pages=60, seed=2
    )
    arrays, _ = batch.arrays("float32")
    out = ragged_paged_attention(*arrays, **geometry.options, implementation="reference")
    check_result((out, None), batch, geometry, "float32")


@pytest.mark.parametrize("page_size", [4, 16])
@pytest.mark.parametrize(
    "options", [{}, {"batch_invariant": True}, {"implementation": "reference"}]
)
@pytest.mark.parametrize("rows", [[(256, 1), (131, 1), (20, 1)], [(256, 1), (250, 70), (40, 23)]])
def test_what_pages_before_the_window_hold_does_not_matter(rows, options, page_size):
    """The engine gives such pages to others, who may write anything into them."""
    geometry = Geometry(page_size, 1, 2, 16, sliding_window=17)
    tokens = sum(query_len for _, query_len in rows)
    batch = make_batch(
        geometry,
        rows,
        tokens=tokens,
        pages_per_row=256 // page_size,
        num_pages=600 // page_size,
        seed=3,
        num_rows=len(rows),
    )
    attend = functools.partial(ragged_paged_attention, **geometry.options, **options)
    if "implementation" not in options:
        attend = jax.jit(functools.partial(attend, decode_only=tokens == len(rows)))
    expected = attend(*batch.arrays("float32")[0])
    check_result((expected, None), batch, geometry, "float32")
    for row, (seq_len, query_len) in enumerate(rows):
        first = max(seq_len - query_len + 1 - geometry.sliding_window, 0) // page_size
        assert first or seq_len < 50
        for pages in (batch.k_pages, batch.v_pages):
            pages[batch.block_tables[row, :first]] = np.nan
    out = attend(*batch.arrays("float32")[0])
    np.testing.assert_array_equal(np.asarray(out), np.asarray(expected))


@pytest.mark.parametrize("decode_only", [True, False])
def test_kv_heads_shard_over_a_mesh(decode_only):
    devices = jax.devices()[:2]
    mesh = jax.sharding.Mesh(np.array(devices), ("tensor",))
    geometry = Geometry(16, 2, 3, 16)
    rows = [(50, 1), (33, 1)] if decode_only else [(50, 1), (33, 20)]
    batch = make_batch(
        geometry,
        rows,
        tokens=2 if decode_only else 24,
        pages_per_row=4,
        num_pages=9,
        seed=4,
        num_rows=2,
    )
    heads, pages = P(None, "tensor"), P(None, "tensor")
    sharded = jax.jit(
        jax.shard_map(
            functools.partial(ragged_paged_attention, **geometry.options, decode_only=decode_only),
            mesh=mesh,
            in_specs=(heads, (pages, pages), P(), P(), P()),
            out_specs=heads,
        )
    )
    arrays, _ = batch.arrays("float32")
    expected = compiled(geometry, decode_only)(*arrays)
    np.testing.assert_allclose(np.asarray(sharded(*arrays)), np.asarray(expected), atol=1e-6)


@pytest.mark.jax_floor
def test_temporaries_of_a_decode_step_do_not_grow_with_the_block_table():
    geometry = Geometry(16, 2, 2, 32)

    def temporaries(pages_per_row):
        batch = make_batch(
            geometry, [(100, 1)] * 6, tokens=6, pages_per_row=pages_per_row, num_pages=60, seed=5
        )
        lowered = compiled(geometry, True).lower(*batch.arrays("bfloat16")[0])
        return lowered.compile().memory_analysis().temp_size_in_bytes

    assert temporaries(512) - temporaries(8) < 6 * 512 * 4 * 3
