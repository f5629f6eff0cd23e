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


@pytest.mark.parametrize(
    "mode", ["raw_logprobs", "raw_logits", "processed_logprobs", "processed_logits"]
)
def test_modes_against_numpy(mode):
    """A greedy row, a biased one, one with a temperature, one of which top-k and min-p leave little; a mask on all."""
    params = [
        SamplingParams(temperature=0.0, logprobs=4),
        SamplingParams(temperature=1.0, logprobs=4, logit_bias={7: 5.0}, repetition_penalty=1.5),
        SamplingParams(temperature=0.5, logprobs=4, seed=1),
        SamplingParams(temperature=2.0, logprobs=4, top_k=6, min_p=0.05, seed=2),
    ]
    R, k, prompt = len(params), 4, np.array([1, 2, 2])
    logits = (np.random.default_rng(4).standard_normal((R, V)) * 2).astype(np.float32)
    rows = SamplingRows(R, V, max_logprobs=k)
    for row, param in enumerate(params):
        rows.set_row(row, param, prompt, len(prompt))
    order, every = np.arange(R), np.ones(R, bool)
    forbidden = [0, 40]
    mask = rows.mask_words(None, R)
    for token in forbidden:
        mask[:, token // 32] &= ~np.uint32(1 << (token % 32))
    state = SamplerState(R, V)
    state.update(rows)
    out, _ = jax.jit(sample, static_argnames=("features", "logprobs_mode"))(
        logits,
        rows.gather(order, order, every, R),
        state.arrays,
        mask,
        features=rows.features(order, every, masked=True),
        logprobs_mode=mode,
    )
    expected = logits.astype(np.float64)
    if mode.startswith("processed"):
        expected[:, forbidden] = -np.inf
        expected[1, 7] += 5
        for token in prompt:
            expected[1, token] = logits[1, token] * (1 / 1.5 if logits[1, token] > 0 else 1.5)
        expected[2] /= 0.5
        expected[3] /= 2.0
        probabilities = np.exp(expected[3] - expected[3].max())
        worst = np.sort(expected[3])[-6]
        expected[3, (expected[3] < worst) | (probabilities < 0.05)] = -np.inf
    if mode.endswith("logprobs"):
        expected = log_softmax(expected, axis=1)
    ids, values, ranks = (np.asarray(x) for x in out.logprobs)
    chosen = np.asarray(out.token_ids)
    np.testing.assert_array_equal(ids[:, 0], chosen)
    got = np.take_along_axis(expected, ids, axis=1)
    np.testing.assert_allclose(values, got, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(
        values[:, 1:], -np.sort(-expected, axis=1)[:, :k], rtol=1e-4, atol=1e-4
    )
    own = expected[np.arange(R), chosen][:, None]
    np.testing.assert_array_equal(ranks, 1 + (expected > own).sum(axis=1))
