"""Sampled tokens against the exact distribution, by chi-square."""

import functools

import jax
import numpy as np
import pytest
from scipy import stats

from jaxinfer.executor.sampler import sample
from jaxinfer.executor.sampling_rows import SamplingRows
from jaxinfer.sampling_params import SamplingParams

R = 2048
jitted_sample = jax.jit(sample, static_argnames="features")


def exact_distribution(logits, params):
    x = logits.astype(np.float64) / params.temperature
    p = np.exp(x - x.max())
    p /= p.sum()
    p[p < params.min_p * p.max()] = 0
    order = np.argsort(-p, kind="stable")
    if params.top_k > 0:
        p[order[params.top_k :]] = 0
    p /= p.sum()
    reached = np.searchsorted(np.cumsum(p[order]), params.top_p) + 1
    p[order[reached:]] = 0
    return p / p.sum()


def counts_of(logits, rows, draws):
    packed_rows = np.arange(R)
    every = np.ones(R, bool)
    features = rows.features(packed_rows, every, masked=False)
    tiled = np.tile(logits, (R, 1))
    counts = np.zeros(len(logits))
    for step in range(draws):
        packed = rows.gather(packed_rows, np.full(R, 100 + step), every, R)
        out, _ = jitted_sample(tiled, packed, None, None, features=features)
        counts += np.bincount(np.asarray(out.token_ids), minlength=len(logits))
    return counts


def assert_distribution(counts, p):
    assert counts[p == 0].sum() == 0, "a filtered token was sampled"
    kept = p > 0
    if kept.sum() > 1:
        expected = p[kept] * counts.sum()
        # Cells with few expected counts are pooled, as the test's approximation wants.
        small = expected < 8
        observed = np.append(counts[kept][~small], counts[kept][small].sum())
        expected = np.append(expected[~small], expected[small].sum())
        if expected[-1] == 0:
            observed, expected = observed[:-1], expected[:-1]
        assert stats.chisquare(observed, expected).pvalue > 1e-4


@functools.cache
def small_logits(V):
    return (np.random.default_rng(V).standard_normal(V) * 2).astype(np.float32)


CASES = [
    {},
    {"temperature": 0.5},
    {"temperature": 1.7},
    {"top_k": 5},
    {"top_p": 0.8},
    {"min_p": 0.1},
    {"top_k": 12, "top_p": 0.9},
    {"top_k": 12, "min_p": 0.05},
    {"top_p": 0.9, "min_p": 0.05},
    {"temperature": 1.3, "top_k": 10, "top_p": 0.85, "min_p": 0.03},
    {"top_k": 1},
    {"top_p": 1e-6},
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_distribution_over_many_seeds(case):
    """V = 37 is no multiple of any block size."""
    logits = small_logits(37)
    params = SamplingParams(**case)
    rows = SamplingRows(R, 37, seed=1)
    for row in range(R):
        rows.set_row(row, params, np.arange(3), 3)
    assert_distribution(counts_of(logits, rows, 20), exact_distribution(logits, params))


def test_distribution_over_positions_of_one_seed():
    logits = small_logits(37)
    params = SamplingParams(seed=7, temperature=1.2)
    rows = SamplingRows(1, 37)
    rows.set_row(0, params, np.arange(3), 3)
    always = np.zeros(R, np.int64)
    packed = rows.gather(always, np.arange(R * 10, R * 11), np.ones(R, bool), R)
    features = rows.features(always, np.ones(R, bool), masked=False)
    out, _ = jitted_sample(np.tile(logits, (R, 1)), packed, None, None, features=features)
    counts = np.bincount(np.asarray(out.token_ids), minlength=37)
    assert_distribution(counts, exact_distribution(logits, params))


@pytest.mark.parametrize("case", [{}, {"top_p": 0.7}, {"top_k": 600}], ids=str)
def test_distribution_over_many_blocks(case):
    V = 2048
    logits = (small_logits(V) / 2).astype(np.float32)
    params = SamplingParams(**case)
    rows = SamplingRows(R, V, seed=2)
    for row in range(R):
        rows.set_row(row, params, np.arange(3), 3)
    assert_distribution(counts_of(logits, rows, 12), exact_distribution(logits, params))
