"""Sinks, log-sum-exps, whole contexts and 8-bit caches against the float64 oracle, alone and combined."""

import dataclasses
import functools
import itertools
import os

import jax
import jax.numpy as jnp
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

LONG = bool(os.environ.get("MOSAIC_ATTENTION_LONG"))
KV_DTYPES = (None, "float8_e4m3fn", "int8")
"""uint8 is float8_e4m3fn once it is read."""
VISIBILITY = ({}, {"causal": False}, {"sliding_window": 37})


def geometry(kv_dtype, visibility, soft_cap, sinks):
    return Geometry(16, 2, 2, 16, soft_cap=soft_cap, sinks=sinks, kv_dtype=kv_dtype, **visibility)


COMBINATIONS = tuple(
    itertools.starmap(
        geometry, itertools.product(KV_DTYPES, VISIBILITY, (None, 2.0), (False, True))
    )
)
# Of soft cap and sinks, which share no code with the others, each combination has one, both or none.
SOME = tuple(
    geometry(kv_dtype, visibility, 2.0 if (i + j) % 2 else None, (i * 3 + j) // 2 % 2 == 0)
    for (i, kv_dtype), (j, visibility) in itertools.product(
        enumerate(KV_DTYPES), enumerate(VISIBILITY)
    )
)
ROWS = [(83, 1), (700, 1), (97, 97), (300, 5), (0, 0), (161, 30)]
ALL = Geometry(16, 2, 3, 32, soft_cap=3.0, sinks=True, kv_dtype="uint8")


def batch_of(geometry, rows, *, tokens=160, longest=700, seed=0, num_rows=MAX_ROWS):
    pages = -(-longest // geometry.page_size) + 1
    return make_batch(
        geometry,
        rows,
        tokens=tokens,
        pages_per_row=pages,
        # One size whatever is in use: one program.
        num_pages=num_rows * pages + 2,
        seed=seed,
        num_rows=num_rows,
    )


def test_the_few_have_every_pair_of_options():
    pairs = {(g.kv_dtype, g.causal, g.sliding_window) for g in SOME}
    assert len(pairs) == len(SOME) == len(KV_DTYPES) * len(VISIBILITY)
    assert {(g.soft_cap, g.sinks) for g in SOME} == set(
        itertools.product((None, 2.0), (False, True))
    )
    for name in ("kv_dtype", "causal", "sliding_window"):
        for value in {getattr(g, name) for g in SOME}:
            assert {g.sinks for g in SOME if getattr(g, name) == value} == {False, True}
            assert {g.soft_cap for g in SOME if getattr(g, name) == value} == {None, 2.0}


@pytest.mark.parametrize("geometry", COMBINATIONS if LONG else SOME, ids=str)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"] if LONG else ["float32"])
def test_combinations_of_options(geometry, dtype):
    check(batch_of(geometry, ROWS), geometry, dtype, return_lse=True)
    decodes = [(n, 1) for n in (1, 64, 65, 700)] + [(0, 0), (333, 1)]
    batch = batch_of(geometry, decodes, tokens=MAX_ROWS)
    # An unused row among the others, as decode_only means tokens by row.
    batch = dataclasses.replace(batch, query_start_loc=np.arange(MAX_ROWS + 1, dtype=np.int32))
    check(batch, geometry, dtype, decode_only=True, return_lse=True)


@pytest.mark.parametrize("window", [None, 37])
def test_alibi(window):
    geometry = Geometry(16, 2, 3, 16, sliding_window=window, soft_cap=3.0, sinks=True, alibi=True)
    check(batch_of(geometry, ROWS), geometry, "float32", return_lse=True)
    batch = batch_of(geometry, [(n, 1) for n in (1, 64, 65, 700)], tokens=MAX_ROWS)
    starts = np.arange(MAX_ROWS + 1, dtype=np.int32)
    batch = dataclasses.replace(batch, query_start_loc=starts)
    check(batch, geometry, "float32", decode_only=True, return_lse=True)


ALIBI = Geometry(16, 2, 3, 16, alibi=True)


@pytest.mark.parametrize("geometry", [*SOME, ALL, ALIBI], ids=str)
def test_reference_backend(geometry):
    batch = batch_of(geometry, [(20, 1), (70, 33), (0, 0), (5, 5)], longest=80)
    arrays, keywords = batch.arrays("float32")
    result = ragged_paged_attention(
        *arrays, **keywords, **geometry.options, return_lse=True, implementation="reference"
    )
    check_result(result, batch, geometry, "float32")


@st.composite
def mixed_rows(draw, longest=700, tokens=500, causal=True):
    """(context, query tokens) of decodes, chunks and empty rows, in any order."""
    rows, left = [], tokens
    for _ in range(draw(st.integers(0, MAX_ROWS))):
        kind = draw(st.sampled_from(["decode", "few", "chunk", "empty"]))
        most = {"decode": 1, "few": 8, "chunk": 300, "empty": 0}[kind]
        if kind == "empty" or left == 0:
            rows.append((0, 0))
            continue
        query_len = draw(st.integers(1, min(most, left)))
        rows.append((draw(st.integers(query_len if causal else 0, longest)), query_len))
        left -= query_len
    return rows


@pytest.mark.jax_floor
@pytest.mark.parametrize(
    ("geometry", "dtype"),
    [
        (ALL, "bfloat16"),
        (dataclasses.replace(ALL, kv_dtype="int8", sliding_window=100), "float32"),
        (dataclasses.replace(ALL, kv_dtype=None, causal=False), "float32"),
        (dataclasses.replace(ALL, causal=False, page_size=4, soft_cap=None), "float16"),
    ],
    ids=str,
)
@given(data=st.data(), seed=st.integers(0, 2**31))
@settings(max_examples=200 if LONG else 12, deadline=None)
def test_random_batches(geometry, dtype, data, seed):
    rows = data.draw(mixed_rows(causal=geometry.causal))
    batch = batch_of(geometry, rows, tokens=510, seed=seed)
    check(batch, geometry, dtype, return_lse=True)


def test_tokens_that_see_nothing_have_no_log_sum_exp():
    geometry = dataclasses.replace(ALL, causal=False)
    batch = batch_of(geometry, [(0, 1), (0, 70), (9, 80)])
    arrays, keywords = batch.arrays("float32")
    out, lse = compiled(geometry, False, True)(*arrays, **keywords)
    assert not np.asarray(out[:71]).any()
    assert np.isneginf(lse[:71]).all()
    # More tokens than context: all of them see all of it.
    check_result((out, lse), batch, geometry, "float32")


def test_a_sink_of_minus_infinity_changes_nothing():
    geometry = Geometry(16, 1, 2, 16)
    batch = batch_of(geometry, ROWS)
    arrays, _ = batch.arrays("float32")
    sinks = jnp.array([-jnp.inf, 0.5])
    plain, lse = compiled(geometry, False, True)(*arrays)
    sunk, sunk_lse = compiled(geometry, False, True)(*arrays, sinks=sinks)
    np.testing.assert_allclose(sunk[:, 0], plain[:, 0], atol=1e-6)
    np.testing.assert_allclose(sunk_lse[:, 0], lse[:, 0], rtol=1e-6)
    owned = batch.query_start_loc[-1]
    assert (sunk_lse[:owned, 1] > lse[:owned, 1]).all()


def test_two_parts_of_a_context_merge_by_their_log_sum_exps():
    """A prefix that several requests share, attended to once, and then each one's own rest."""
    geometry = Geometry(16, 2, 2, 16, sinks=True)
    shared, own = 48, [(60, 12), (70, 1), (49, 1), (48 + 33, 20)]
    batch = batch_of(geometry, own, tokens=34, num_rows=4)
    tables = batch.block_tables.copy()
    tables[:, : shared // 16] = tables[0, : shared // 16]
    batch = dataclasses.replace(batch, block_tables=tables)
    (q, pages, *_), keywords = batch.arrays("float32")
    attend = jax.jit(
        functools.partial(ragged_paged_attention, scale=geometry.options["scale"], return_lse=True),
        static_argnames="causal",
    )
    starts = jnp.asarray(batch.query_start_loc)
    prefix, prefix_lse = attend(
        q,
        pages,
        jnp.asarray(tables[:1]),
        jnp.array([shared], jnp.int32),
        jnp.array([0, 34], jnp.int32),
        causal=False,
    )
    rest, rest_lse = attend(
        q,
        pages,
        jnp.asarray(tables[:, shared // 16 :]),
        jnp.asarray(batch.seq_lens - shared),
        starts,
        sinks=keywords["sinks"],
    )
    lse = jnp.logaddexp(prefix_lse, rest_lse)
    merged = (
        prefix * jnp.exp(prefix_lse - lse)[..., None] + rest * jnp.exp(rest_lse - lse)[..., None]
    )
    check_result((merged, lse), batch, geometry, "float32")


@pytest.mark.jax_floor
@pytest.mark.parametrize("decode_only", [True, False])
def test_heads_scales_and_sinks_shard_over_a_mesh(decode_only):
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("tensor",))
    rows = [(50, 1), (33, 1)] if decode_only else [(50, 1), (33, 20)]
    batch = batch_of(ALL, rows, tokens=2 if decode_only else 24, longest=64, num_rows=2)
    heads, scales = P(None, "tensor"), P("tensor")

    def attend(arrays, keywords):
        return ragged_paged_attention(
            *arrays, **keywords, **ALL.options, decode_only=decode_only, return_lse=True
        )

    sharded = jax.jit(
        jax.shard_map(
            attend,
            mesh=mesh,
            in_specs=(
                (heads, (heads, heads), P(), P(), P()),
                {"sinks": scales, "kv_scales": (scales, scales)},
            ),
            out_specs=(heads, heads),
        )
    )
    check_result(sharded(*batch.arrays("float32")), batch, ALL, "float32")


@pytest.mark.jax_floor
@pytest.mark.parametrize("decode_only", [True, False])
@pytest.mark.parametrize("kv_dtype", ["uint8", "int8"])
def test_an_8_bit_cache_is_never_converted_as_a_whole(kv_dtype, decode_only):
    geometry = Geometry(16, 2, 2, 32, kv_dtype=kv_dtype)

    def temporaries(num_pages):
        batch = make_batch(
            geometry, [(100, 1)] * 6, tokens=6, pages_per_row=8, num_pages=num_pages, seed=5
        )
        arrays, keywords = batch.arrays("bfloat16")
        lowered = compiled(geometry, decode_only).lower(*arrays, **keywords)
        return lowered.compile().memory_analysis().temp_size_in_bytes

    assert temporaries(4000) == temporaries(60)
