"""Logprobs against scipy's log_softmax."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import log_softmax

from jaxinfer.executor import logprobs
from jaxinfer.executor.sampler import sample
from jaxinfer.executor.sampler_state import SamplerState
from jaxinfer.executor.sampling_rows import SamplingRows
from jaxinfer.sampling_params import SamplingParams

V = 64


def check(scored, logits, chosen, k):
    ids, values, ranks = (np.asarray(x) for x in scored)
    expected = log_softmax(logits.astype(np.float64), axis=1)
    n = len(chosen)
    assert ids.shape == values.shape == (n, k + 1)
    np.testing.assert_array_equal(ids[:, 0], chosen)
    np.testing.assert_allclose(
        values, np.take_along_axis(expected, ids, axis=1), rtol=1e-5, atol=1e-5
    )
    np.testing.assert_allclose(
        values[:, 1:], -np.sort(-expected, axis=1)[:, :k], rtol=1e-5, atol=1e-5
    )
    own = expected[np.arange(n), chosen][:, None]
    np.testing.assert_array_equal(ranks, 1 + (expected > own).sum(axis=1))


def test_sampled_logprobs_are_those_of_the_raw_logits():
    R = 6
    logits = (np.random.default_rng(0).standard_normal((R, V)) * 3 + 500).astype(np.float32)
    rows = SamplingRows(R, V, max_logprobs=5)
    for row in range(R):
        params = SamplingParams(logprobs=2, top_k=40, temperature=2.0, seed=row)
        rows.set_row(row, params, np.arange(3), 3)
    order, every = np.arange(R), np.ones(R, bool)
    features = rows.features(order, every, masked=False)
    assert features.num_logprobs == 5
    packed = rows.gather(order, order, every, R)
    state = SamplerState(R, V)
    state.update(rows)
    out, _ = jax.jit(sample, static_argnames="features")(
        logits, packed, state.arrays, rows.mask_words(None, R), features=features
    )
    check(out.logprobs, logits, np.asarray(out.token_ids), 5)


@pytest.mark.parametrize("k", [0, 3, V])
@pytest.mark.parametrize("T", [5, 64])
def test_prompt_logprobs_block_by_block(monkeypatch, T, k):
    monkeypatch.setattr(logprobs, "_BLOCK_BYTES", 4 * V * 24)
    rng = np.random.default_rng(1)
    hidden = rng.standard_normal((T, 8)).astype(np.float32)
    head = rng.standard_normal((8, V)).astype(np.float32)
    targets = rng.integers(0, V, T).astype(np.int32)
    seen = []

    def compute_logits(x):
        seen.append(x.shape[0])
        return jnp.dot(x, head, precision="highest")

    scored = jax.jit(
        lambda h, t: logprobs.prompt_logprobs(compute_logits, h, t, num_logprobs=k, vocab_size=V)
    )(hidden, targets)
    assert max(seen) <= 24
    check(scored, hidden @ head, targets, k)


def test_the_argmax_has_rank_one_also_when_it_ties():
    logits = np.zeros((2, V), np.float32)
    logits[:, [3, 9]] = 2.0
    scored = logprobs.token_logprobs(jnp.asarray(logits), jnp.asarray([9, 0]), 2)
    np.testing.assert_array_equal(np.asarray(scored.ranks), [1, 3])
