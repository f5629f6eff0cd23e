"""Attention with shared prefixes against a float64 oracle that knows of no prefixes, and at its edges."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

from kernels_pallas import SharedPrefixes, shared_prefix_attention
from kernels_pallas.shared_prefix_attention import cascade, merge, prefixes
from kernels_pallas.shared_prefix_attention.merge import merge_attention
from tests.kernels_pallas.paged_batches import Batch, Geometry, check_result
from tests.kernels_pallas.shared_batches import NUM_GROUPS, NUM_ROWS, Group, shared_batch

GEOMETRIES = (
    Geometry(16, 3, 3, 64),
    Geometry(4, 1, 4, 16, soft_cap=3.0, sinks=True),
    Geometry(8, 2, 2, 32, sinks=True, kv_dtype="int8"),
)


@functools.cache
def compiled(geometry: Geometry, **options):
    keep = {"scale": geometry.options["scale"], "soft_cap": geometry.soft_cap}
    return jax.jit(functools.partial(shared_prefix_attention, **keep, **options))


def check(batch: Batch, shared: SharedPrefixes, geometry: Geometry, dtype: str, **options) -> None:
    arrays, keywords = batch.arrays(dtype)
    out = compiled(geometry, **options)(*arrays, shared, **keywords)
    check_result((out, None), batch, geometry, dtype)


def near_page_edges(page_size: int) -> st.SearchStrategy[int]:
    """1 token up to three pages, often one below, at or above a whole number of pages."""
    edges = [n * page_size + d for n in (1, 2) for d in (-1, 0, 1)]
    return st.sampled_from([1, *edges]) | st.integers(1, 3 * page_size)


@st.composite
def mixes(draw, page_size: int, max_queries: int):
    """Up to three groups of one row or more, rows by themselves, and rows of nobody up to `NUM_ROWS`."""

    def row() -> tuple[int, int]:
        own = draw(near_page_edges(page_size))
        return own, draw(st.integers(1, min(own, max_queries)))

    groups, left = [], draw(st.integers(0, NUM_ROWS))
    for _ in range(draw(st.integers(0, NUM_GROUPS))):
        count = draw(st.integers(0, left))
        if count:
            groups.append(Group(draw(st.integers(0, 5)), tuple(row() for _ in range(count))))
        left -= count
    return groups, [row() for _ in range(left)]


@pytest.mark.parametrize(
    ("geometry", "dtype", "num_splits"),
    [
        (GEOMETRIES[0], "float32", 1),
        (GEOMETRIES[0], "bfloat16", 3),
        (GEOMETRIES[1], "float32", 3),
        (GEOMETRIES[2], "bfloat16", 1),
    ],
    ids=str,
)
@given(data=st.data(), seed=st.integers(0, 2**31))
@settings(max_examples=8, deadline=None)
def test_decodes_match_the_oracle(geometry, dtype, num_splits, data, seed):
    groups, alone = data.draw(mixes(geometry.page_size, 1))
    batch, shared = shared_batch(geometry, groups, alone, tokens=NUM_ROWS, seed=seed)
    check(batch, shared, geometry, dtype, decode_only=True, num_splits=num_splits)


@pytest.mark.parametrize(
    ("geometry", "num_splits"), [(GEOMETRIES[0], 2), (GEOMETRIES[1], 1)], ids=str
)
@given(data=st.data(), seed=st.integers(0, 2**31))
@settings(max_examples=8, deadline=None)
def test_chunks_match_the_oracle(geometry, num_splits, data, seed):
    groups, alone = data.draw(mixes(geometry.page_size, 12))
    batch, shared = shared_batch(geometry, groups, alone, tokens=12 * NUM_ROWS, seed=seed)
    check(batch, shared, geometry, "float32", num_splits=num_splits)


@functools.cache
def long_batch(geometry: Geometry = GEOMETRIES[0]):
    """Decodes of a group of four, a group of two and one by itself."""
    size = geometry.page_size
    groups = [
        Group(5, tuple((own, 1) for own in (1, size, size + 1, 3 * size - 1))),
        Group(2, ((3, 1), (size, 1))),
    ]
    return shared_batch(geometry, groups, [(size + 2, 1)], tokens=NUM_ROWS, seed=1)


def test_reference_backend_knows_of_no_prefixes():
    geometry = GEOMETRIES[1]
    batch, shared = long_batch(geometry)
    arrays, keywords = batch.arrays("float32")
    out = shared_prefix_attention(
        *arrays,
        shared,
        scale=geometry.options["scale"],
        soft_cap=geometry.soft_cap,
        decode_only=True,
        implementation="reference",
        **keywords,
    )
    check_result((out, None), batch, geometry, "float32")


@pytest.mark.jax_floor
def test_half_precision():
    batch, shared = long_batch()
    check(batch, shared, GEOMETRIES[0], "float16", decode_only=True)


@pytest.mark.jax_floor
def test_kv_heads_shard_over_a_mesh():
    geometry = Geometry(16, 2, 3, 16)
    batch, shared = long_batch(geometry)
    arrays, _ = batch.arrays("float32")
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("tensor",))
    heads = P(None, "tensor")
    attend = functools.partial(
        shared_prefix_attention, scale=geometry.options["scale"], decode_only=True
    )
    sharded = jax.jit(
        jax.shard_map(
            attend,
            mesh=mesh,
            in_specs=(heads, (heads, heads), P(), P(), P(), P()),
            out_specs=heads,
        )
    )
    check_result((sharded(*arrays, shared), None), batch, geometry, "float32")


def test_merging_pieces_is_attention_over_their_union():
    rng = np.random.default_rng(0)
    scores, values = rng.normal(size=(5, 3, 12)) * 6, rng.normal(size=(12, 4))

    def attend(piece):
        weight = np.exp(scores[..., piece])
        out = weight @ values[piece] / weight.sum(-1, keepdims=True)
        return jnp.asarray(out, jnp.float32), jnp.asarray(np.log(weight.sum(-1)), jnp.float32)

    expected, expected_lse = attend(slice(None))
    out, lse = merge_attention(*attend(slice(0, 5)), *attend(slice(5, None)))
    np.testing.assert_allclose(out, expected, atol=1e-6)
    np.testing.assert_allclose(lse, expected_lse, atol=1e-6)
    nothing = jnp.full_like(out, jnp.nan), jnp.full_like(lse, -jnp.inf)
    for pair in ((out, lse, *nothing), (*nothing, out, lse)):
        same = merge_attention(*pair)
        np.testing.assert_array_equal(same[0], out)
        np.testing.assert_array_equal(same[1], lse)
    zeros, minus_inf = merge_attention(*nothing, *nothing)
    assert not zeros.any() and (minus_inf == -jnp.inf).all()


FAULTS = {
    "the prefix counts twice": (
        cascade,
        "jnp.maximum(seq_lens - prefix_lens, 0)",
        "seq_lens",
    ),
    "the rest begins one page late": (
        cascade,
        "prefix_lens // page_size)",
        "prefix_lens // page_size + 1)",
    ),
    "the rest begins with the prefix": (cascade, "prefix_lens // page_size)", "0 * prefix_lens)"),
    "the pieces weigh the same": (merge, "weight = jnp.exp(", "weight = 1 + 0 * jnp.exp("),
    "the sink counts in both phases": (
        cascade,
        "    options |= {",
        "    options |= {'sinks': SINKS, ",
    ),
    "rows by themselves share the last prefix": (
        prefixes,
        "jnp.pad(prefixes.lens, (0, 1))[group]",
        "prefixes.lens[jnp.minimum(group, 1)]",
    ),
    "the last piece of a prefix is lost": (
        prefixes,
        "(pages + num_splits - 1) // num_splits",
        "pages // num_splits",
    ),
}


def planted(module: ModuleType, before: str, after: str) -> dict[str, object]:
    """The names of `module` with `before` in its source replaced."""
    source = Path(module.__file__).read_text()
    assert source.count(before) == 1, before
    names = {"__name__": module.__name__, "SINKS": jnp.ones(12)}
    exec(compile(source.replace(before, after), module.__file__, "exec"), names)
    return names


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_caught(fault, monkeypatch):
    geometry = replace(GEOMETRIES[0], kv_heads=3, group=4, sinks=True)
    batch, shared = long_batch(geometry)
    arrays, keywords = batch.arrays("float32")
    options = dict(scale=geometry.options["scale"], decode_only=True, num_splits=3)

    def run() -> None:
        result = shared_prefix_attention(*arrays, shared, **options, **keywords)
        check_result((result, None), batch, geometry, "float32")

    run()
    module, before, after = FAULTS[fault]
    for name, value in planted(module, before, after).items():
        for user in {module, cascade}:
            if callable(value) and hasattr(user, name):
                monkeypatch.setattr(user, name, value)
    # Where the arrays are at hand, `ragged_paged_attention` refuses lengths that can't be.
    with pytest.raises((AssertionError, ValueError)):
        run()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(block_tables=jnp.zeros(3, jnp.int32)), r"block_tables must have shape \[C, P\]"),
        (dict(lens=jnp.zeros(4, jnp.int32)), r"lens must have shape \[3\].*got \(4,\)"),
        (dict(query_start_loc=jnp.zeros(3, jnp.int32)), r"query_start_loc must have shape \[4\]"),
        (dict(lens=jnp.zeros(3, jnp.float32)), "lens must be int32, got float32"),
    ],
)
def test_arguments_that_do_not_fit_are_named(change, message):
    batch, shared = long_batch()
    arrays, _ = batch.arrays("float32")
    with pytest.raises(ValueError, match=message):
        shared_prefix_attention(*arrays, shared._replace(**change), scale=0.1)


def test_num_splits_is_positive():
    batch, shared = long_batch()
    arrays, _ = batch.arrays("float32")
    with pytest.raises(ValueError, match="num_splits must be at least 1 or None, got 0"):
        shared_prefix_attention(*arrays, shared, scale=0.1, num_splits=0)
