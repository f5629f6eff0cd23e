"""Top-k, top-p and min-p against a float64 reference that sorts."""

import functools

import jax
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jaxinfer.executor.radix_search import largest_reaching
from jaxinfer.executor.token_filter import block_maxima, token_filter

R = 4
MASS_EPS = 2e-6
kth_largest = jax.jit(largest_reaching)


@functools.partial(jax.jit, static_argnames="near_blocks")
def kept_tokens(logits, temperature, top_k, top_p, min_p, near_blocks):
    index = np.broadcast_to(np.arange(logits.shape[1], dtype=np.int32), logits.shape)
    found = token_filter(
        logits,
        block_maxima(logits),
        temperature,
        top_k,
        top_p,
        min_p,
        near_blocks=near_blocks,
    )
    return found.keeps(logits, index)


def check_row(kept, logits, temperature, top_k, top_p, min_p):
    """`kept` must be what sorting gives, with either answer where float32 can't tell."""
    x = logits.astype(np.float64)
    finite = np.isfinite(x)
    floor = x.max() + temperature * np.log(min_p) if min_p > 0 else -np.inf
    unsure = np.abs(x - floor) < 1e-5 * (1 + abs(floor)) if min_p > 0 else np.zeros(len(x), bool)
    allowed = (x >= floor) | unsure
    if top_k:
        allowed &= x >= np.sort(x)[-top_k]
    order = np.argsort(-x, kind="stable")
    order = order[(allowed & finite)[order]]
    weights = np.exp((x[order] - x.max()) / temperature)
    count = int((kept & finite).sum())
    assert np.array_equal(np.sort(order[:count]), np.flatnonzero(kept & finite))
    if unsure.any():
        return
    mass = np.cumsum(weights) / weights.sum()
    if top_p == 1:
        assert count == len(order)
    else:
        assert mass[count - 1] >= top_p - MASS_EPS
        assert count == 1 or mass[count - 2] < top_p + MASS_EPS


parameters = st.tuples(
    st.floats(1 / 16, 4, width=32),
    st.one_of(st.just(0), st.integers(1, 400)),
    st.one_of(st.just(1.0), st.floats(1 / 128, 1 - 1 / 1024, width=32)),
    st.one_of(st.just(0.0), st.floats(1 / 1024, 1, width=32)),
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    seed=st.integers(0, 2**31),
    grid=st.sampled_from([None, 0.5, 4.0]),
    spread=st.sampled_from([0.01, 1.0, 8.0]),
    masked=st.sampled_from([0.0, 0.5, 0.99]),
    offset=st.sampled_from([0.0, -50.0, 1000.0]),
    rows=st.lists(parameters, min_size=R, max_size=R),
    shape=st.sampled_from([(512, 4), (512, 128), (96, 128)]),
)
def test_kept_set_is_that_of_a_sort(seed, grid, spread, masked, offset, rows, shape):
    """`grid` rounds logits so that many tie; (512, 4) searches 4 near blocks first, the other two
    shapes everything at once."""
    V, near_blocks = shape
    rng = np.random.default_rng(seed)
    logits = rng.standard_normal((R, V)) * spread + offset
    if grid:
        logits = np.round(logits / grid) * grid
    logits = logits.astype(np.float32)
    hidden = rng.random((R, V)) < masked
    hidden[:, rng.integers(V)] = False
    logits[hidden] = -np.inf
    columns = [np.asarray(c) for c in zip(*rows, strict=True)]
    top_k = np.where(columns[1] < V, columns[1], 0).astype(np.int32)
    temperature, top_p, min_p = (columns[i].astype(np.float32) for i in (0, 2, 3))
    kept = np.asarray(kept_tokens(logits, temperature, top_k, top_p, min_p, near_blocks))
    for r in range(R):
        check_row(kept[r], logits[r], temperature[r], int(top_k[r]), top_p[r], min_p[r])


def test_near_and_whole_search_agree_whoever_shares_the_batch():
    """20 rows of which 13 need the whole search, more than are searched at once; the others get the
    same filter as without them."""
    n = 20
    logits = np.random.default_rng(0).standard_normal((n, 512)).astype(np.float32)
    peaked = np.arange(n) % 3 == 0
    logits[peaked] *= 6
    one, p, m = (np.full(n, v, np.float32) for v in (1, 0.9, 0))
    k = np.zeros(n, np.int32)
    both = np.asarray(kept_tokens(logits, one, k, p, m, 4))
    calm = np.where(peaked[:, None], logits, logits[0])
    alone = np.asarray(kept_tokens(calm, one, k, p, m, 4))
    whole = np.asarray(kept_tokens(logits, one, k, p, m, 128))
    assert both[peaked].sum(axis=1).max() < 128 < both[~peaked].sum(axis=1).min()
    np.testing.assert_array_equal(both[peaked], alone[peaked])
    np.testing.assert_array_equal(both, whole)
    for r in range(n):
        check_row(both[r], logits[r], 1.0, 0, np.float32(0.9), 0.0)


@pytest.mark.parametrize("ties", [3, 4, 100])
def test_nucleus_takes_no_more_ties_than_it_needs(ties):
    logits = np.full((R, 128), -30, np.float32)
    logits[:, 5 : 5 + ties] = 2.0
    args = [np.full(R, v, np.float32) for v in (1.0, 0.5, 0.0)]
    kept = np.asarray(kept_tokens(logits, args[0], np.zeros(R, np.int32), args[1], args[2], 128))
    expected = np.arange(5, 5 + -(-ties // 2))
    for r in range(R):
        np.testing.assert_array_equal(np.flatnonzero(kept[r]), expected)


@settings(max_examples=60, deadline=None)
@given(
    values=st.lists(
        st.floats(width=32, allow_nan=False, allow_subnormal=False), min_size=40, max_size=40
    ),
    k=st.integers(1, 40),
)
def test_kth_largest_of_any_floats(values, k):
    x = np.asarray([values], np.float32)
    found = np.asarray(kth_largest(x, None, np.asarray([k], np.int32)))[0]
    # XLA on CPU compares subnormal numbers as zeros, so any of them stands for a zero.
    found = 0.0 if abs(found) < np.finfo(np.float32).tiny else found
    assert found == np.sort(x[0])[-k]
