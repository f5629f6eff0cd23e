"""Speculative sampling gives the target's distribution: chi-square against float64, for proposals good and bad."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.stats import chisquare

from jaxinfer.executor.speculative.rejection import sample_given_drafts, uniforms

V, N = 7, 40_000


def softmax(x: np.ndarray) -> np.ndarray:
    weights = np.exp(x - x.max())
    return weights / weights.sum()


def proposal(kind: str, p: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    match kind:
        case "equal":
            return p
        case "near":
            return softmax(np.log(p + 1e-9) + rng.normal(0, 0.5, V))
        case "far":
            return softmax(rng.normal(0, 3, V))
        case "uniform":
            return np.full(V, 1 / V)
        case "one":
            return np.eye(V)[2]
        case "impossible":
            return np.eye(V)[0]
    raise AssertionError(kind)


@pytest.mark.parametrize("kind", ["equal", "near", "far", "uniform", "one", "impossible"])
def test_tokens_are_the_targets_whatever_is_proposed(kind: str) -> None:
    rng = np.random.default_rng(11)
    logits = rng.normal(0, 1.5, V)
    logits[0] = -np.inf  # filtered away
    p = softmax(logits)
    q = proposal(kind, p, rng)
    drafts = rng.choice(V, N, p=q)
    u = uniforms(jnp.full(N, 5), jnp.full(N, -9), jnp.arange(N))
    tokens = np.asarray(
        jax.jit(sample_given_drafts)(
            jnp.tile(jnp.float32(logits), (N, 1)),
            jnp.tile(jnp.float32(q), (N, 1)),
            jnp.int32(drafts),
            u,
        )
    )
    observed = np.bincount(tokens, minlength=V)
    assert observed[0] == 0
    assert chisquare(observed[1:], N * p[1:]).pvalue > 1e-3
    # Accepted as often as the two distributions overlap, Leviathan et al., corollary 3.6.
    overlap, accepted = np.minimum(p, q).sum(), np.mean(tokens == drafts)
    assert abs(accepted - overlap) < 4 * np.sqrt(overlap * (1 - overlap) / N) + 1e-9


def test_without_a_draft_it_draws_from_the_target() -> None:
    rng = np.random.default_rng(2)
    logits = rng.normal(0, 1, V)
    u = uniforms(jnp.full(N, 1), jnp.full(N, 2), jnp.arange(N))
    tokens = sample_given_drafts(
        jnp.tile(jnp.float32(logits), (N, 1)),
        jnp.full((N, V), jnp.nan),
        jnp.full(N, -1),
        u,
    )
    observed = np.bincount(np.asarray(tokens), minlength=V)
    assert chisquare(observed, N * softmax(logits)).pvalue > 1e-3


def test_the_three_numbers_are_independent() -> None:
    u = np.asarray(uniforms(jnp.full(N, 5), jnp.full(N, 6), jnp.arange(N)))
    assert u.min() >= 0 and u.max() < 1
    assert np.abs(np.corrcoef(u.T) - np.eye(3)).max() < 0.02
    other = np.asarray(uniforms(jnp.full(N, 6), jnp.full(N, 6), jnp.arange(N)))
    assert abs(np.corrcoef(u[:, 0], other[:, 0])[0, 1]) < 0.02
