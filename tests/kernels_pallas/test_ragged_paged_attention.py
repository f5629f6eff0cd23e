"""Ragged paged attention against a float64 oracle, on random batches and at its edges."""

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

from kernels_pallas import ragged_paged_attention

TOLERANCE = {"float32": 1e-5, "bfloat16": 1e-2, "float16": 1e-2}
MAX_ROWS = 6


@dataclass(frozen=True)
class Geometry:
    page_size: int
    kv_heads: int
    group: int
    head_size: int
    sliding_window: int | None = None
    soft_cap: float | None = None

    @property
    def options(self):
        return {
            "scale": self.head_size**-0.5,
            "sliding_window": self.sliding_window,
            "soft_cap": self.soft_cap,
        }


GEOMETRIES = (
    Geometry(16, 3, 3, 64),
    Geometry(4, 1, 4, 16, sliding_window=37),
    Geometry(32, 2, 1, 32, sliding_window=100, soft_cap=3.0),
    Geometry(16, 2, 2, 32, soft_cap=2.0),
)


@dataclass(frozen=True)
class Batch:
    q: np.ndarray
    k_pages: np.ndarray
    v_pages: np.ndarray
    block_tables: np.ndarray
    seq_lens: np.ndarray
    query_start_loc: np.ndarray

    def arrays(self, dtype):
        pages = (jnp.asarray(self.k_pages, dtype), jnp.asarray(self.v_pages, dtype))
        return (
            jnp.asarray(self.q, dtype),
            pages,
            jnp.asarray(self.block_tables),
            jnp.asarray(self.seq_lens),
            jnp.asarray(self.query_start_loc),
        )


def make_batch(geometry, rows, *, tokens, pages_per_row, num_pages, seed, num_rows=MAX_ROWS):
    """`rows`: (seq_len, query_len) per real row. Everything that nobody may read is NaN."""
    rng = np.random.default_rng(seed)
    size = geometry.page_size
    shape = (num_pages, geometry.kv_heads, size, geometry.head_size)
    k_pages, v_pages = np.full(shape, np.nan), np.full(shape, np.nan)
    free = list(rng.permutation(np.arange(1, num_pages)))
    block_tables = np.full((num_rows, pages_per_row), free.pop(), np.int32)
    seq_lens = np.zeros(num_rows, np.int32)
    query_start_loc = np.zeros(num_rows + 1, np.int32)
    for row, (seq_len, query_len) in enumerate(rows):
        seq_lens[row] = seq_len
        query_start_loc[row + 1] = query_start_loc[row] + query_len
        for index in range(-(-seq_len // size)):
            page = block_tables[row, index] = free.pop()
            used = min(size, seq_len - index * size)
            for pages in (k_pages, v_pages):
                pages[page, :, :used] = rng.normal(size=(shape[1], used, shape[3]))
    query_start_loc[len(rows) + 1 :] = query_start_loc[len(rows)]
    q = rng.normal(size=(tokens, geometry.kv_heads * geometry.group, geometry.head_size))
    return Batch(q, k_pages, v_pages, block_tables, seq_lens, query_start_loc)


def oracle(arrays, geometry):
    """Token by token in float64, from the arrays as rounded to the dtype under test."""
    q, (k_pages, v_pages), block_tables, seq_lens, query_start_loc = jax.tree.map(
        lambda x: np.asarray(x.astype(jnp.float32), np.float64), arrays[:2]
    ) + tuple(np.asarray(x) for x in arrays[2:])
    out = np.zeros_like(q)
    for row, seq_len in enumerate(seq_lens):
        first, last = query_start_loc[row], query_start_loc[row + 1]
        for token in range(first, last):
            position = seq_len - last + token
            begin = 0
            if geometry.sliding_window is not None:
                begin = max(0, position + 1 - geometry.sliding_window)
            seen = np.arange(begin, position + 1)
            page, offset = block_tables[row, seen // geometry.page_size], seen % geometry.page_size
            for head in range(q.shape[1]):
                keys = k_pages[page, head // geometry.group, offset]
                values = v_pages[page, head // geometry.group, offset]
                score = keys @ q[token, head] * geometry.head_size**-0.5
                if geometry.soft_cap is not None:
                    score = geometry.soft_cap * np.tanh(score / geometry.soft_cap)
                weight = np.exp(score - score.max())
                out[token, head] = weight @ values / weight.sum()
    return out


@functools.cache
def compiled(geometry, decode_only):
    return jax.jit(
        functools.partial(ragged_paged_attention, **geometry.options, decode_only=decode_only)
    )


def check(batch, geometry, dtype, *, decode_only=False):
    arrays = batch.arrays(dtype)
    out = compiled(geometry, decode_only)(*arrays)
    assert out.dtype == jnp.dtype(dtype)
    out = np.asarray(out.astype(jnp.float32), np.float64)
    expected = oracle(arrays, geometry)
    assert np.isfinite(out).all()
    scale = max(np.abs(expected).max(), 1e-3)
    assert np.abs(out - expected).max() / scale < TOLERANCE[dtype]
    assert not out[batch.query_start_loc[-1] :].any()


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
    arrays = batch.arrays("float32")
    out = ragged_paged_attention(*arrays, **geometry.options, implementation="reference")
    expected = oracle(arrays, geometry)
    assert np.abs(np.asarray(out) - expected).max() < 1e-5 * np.abs(expected).max()


def test_pages_outside_the_window_are_not_read():
    geometry = Geometry(16, 1, 2, 16, sliding_window=16)
    batch = make_batch(
        geometry, [(256, 1), (256, 40)], tokens=41, pages_per_row=16, num_pages=40, seed=3
    )
    expected = compiled(geometry, False)(*batch.arrays("float32"))
    # Values are only dropped past a request's length, so NaN in a page that is read would show.
    for row in (0, 1):
        batch.v_pages[batch.block_tables[row, :8]] = np.nan
    out = compiled(geometry, False)(*batch.arrays("float32"))
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
    arrays = batch.arrays("float32")
    expected = compiled(geometry, decode_only)(*arrays)
    np.testing.assert_allclose(np.asarray(sharded(*arrays)), np.asarray(expected), atol=1e-6)


def test_temporaries_of_a_decode_step_do_not_grow_with_the_block_table():
    geometry = Geometry(16, 2, 2, 32)

    def temporaries(pages_per_row):
        batch = make_batch(
            geometry, [(100, 1)] * 6, tokens=6, pages_per_row=pages_per_row, num_pages=60, seed=5
        )
        lowered = compiled(geometry, True).lower(*batch.arrays("bfloat16"))
        return lowered.compile().memory_analysis().temp_size_in_bytes

    assert temporaries(512) - temporaries(8) < 6 * 512 * 4 * 3
