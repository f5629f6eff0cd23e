"""Convolutions and recurrences over ragged batches, against one token at a time in float64."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.models import gated_delta as gated_delta_module
from jaxinfer.models import selective_scan as selective_scan_module
from jaxinfer.models.gated_delta import DeltaInputs, gated_delta
from jaxinfer.models.recurrence import StateRows, causal_conv
from jaxinfer.models.selective_scan import (
    HeadScanInputs,
    ScanInputs,
    head_scan,
    selective_scan,
)

NUM_SLOTS = 9
PADDING = NUM_SLOTS - 1
Reference = Callable[..., tuple[np.ndarray, np.ndarray]]


@pytest.fixture(autouse=True)
def short_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row's tokens in a batch take several of them, the last one not full."""
    monkeypatch.setattr(selective_scan_module, "_SCAN_CHUNK", 5)
    monkeypatch.setattr(selective_scan_module, "_HEADS_CHUNK", 5)
    monkeypatch.setattr(gated_delta_module, "_CHUNK", 5)
    monkeypatch.setattr(gated_delta_module, "_CHANNELS_CHUNK", 5)


class Sequences:
    """Requests of random lengths, fed in random pieces over several ragged batches; states start out as NaN."""

    def __init__(self, lengths: list[int], seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.lengths = lengths
        self.slots = self.rng.permutation(PADDING)[: len(lengths)]
        self.done = [0] * len(lengths)

    def batches(self, budget: int, num_rows: int):
        """(spans, rows, index): which tokens of which request, the batch's `StateRows`, and the batch's order."""
        while left := [i for i, n in enumerate(self.lengths) if self.done[i] < n]:
            spans, room = [], budget
            for i in self.rng.permutation(left)[:num_rows]:
                most = min(room, self.lengths[i] - self.done[i])
                if most:
                    count = 1 if self.rng.random() < 0.3 else int(self.rng.integers(1, most + 1))
                    spans.append((int(i), self.done[i], self.done[i] + count))
                    self.done[i] += count
                    room -= count
            spans.sort(key=lambda s: s[2] - s[1] != 1)
            decode_only = all(stop - start == 1 for _, start, stop in spans)
            yield spans, decode_only

    def rows(self, spans, num_rows: int, decode_only: bool) -> StateRows:
        slots, fresh = np.full(num_rows, PADDING, np.int32), np.ones(num_rows, bool)
        starts = np.zeros(num_rows + 1, np.int32)
        for r, (i, start, stop) in enumerate(spans):
            slots[r], fresh[r] = self.slots[i], start == 0
            starts[r + 1 :] = starts[r] + stop - start
        return StateRows(*map(jnp.asarray, (slots, fresh, starts)), decode_only)


def padding_like(count: int, x: np.ndarray) -> np.ndarray:
    return np.full((count, *x.shape[1:]), 0.7, np.float32)


def check(function, reference: Reference, make_inputs, state_shape: tuple[int, ...], seed: int):
    """`function(inputs, states, rows)` over all batches equals `reference(inputs)` of each whole sequence."""
    sequences = Sequences([1, 2, 5, 23, 40], seed)
    budget, num_rows = 24, 8
    data = [make_inputs(sequences.rng, n) for n in sequences.lengths]
    outputs = [[] for _ in data]
    states = jnp.full((NUM_SLOTS, *state_shape), jnp.nan, jnp.float32)
    run = jax.jit(
        lambda inputs, states, arrays, decode_only: function(
            inputs, states, StateRows(*arrays, decode_only)
        ),
        static_argnums=3,
    )
    for spans, decode_only in sequences.batches(budget, num_rows):
        rows = sequences.rows(spans, num_rows, decode_only)
        size = num_rows if decode_only else budget
        parts = [
            jax.tree.map(lambda x, a=a, b=b: x[a:b].astype(np.float32), data[i])
            for i, a, b in spans
        ]
        missing = size - sum(stop - start for _, start, stop in spans)
        # What padding tokens hold is finite, and matters to nobody.
        parts.append(jax.tree.map(partial(padding_like, missing), parts[0]))
        flat = jax.tree.map(lambda *xs: np.concatenate(xs), *parts)
        out, states = run(flat, states, (rows.slots, rows.fresh, rows.starts), decode_only)
        at = 0
        for i, start, stop in spans:
            outputs[i].append(np.asarray(out[at : at + stop - start]))
            at += stop - start
    for i, inputs in enumerate(data):
        expected, state = reference(inputs)
        np.testing.assert_allclose(np.concatenate(outputs[i]), expected, rtol=2e-4, atol=2e-5)
        found = np.asarray(states[sequences.slots[i]])
        np.testing.assert_allclose(found, state, rtol=2e-4, atol=2e-5)
    free = sorted(set(range(PADDING)) - set(sequences.slots.tolist()))
    assert np.isnan(np.asarray(states)[free]).all(), "a slot of nobody was written"


def softplus(x: np.ndarray) -> np.ndarray:
    return np.log1p(np.exp(x))


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("num_taps", [2, 4])
def test_convolution(num_taps: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    weight, bias = rng.normal(size=(num_taps, 3, 2)), rng.normal(size=(3, 2))

    def reference(x):
        padded = np.concatenate([np.zeros((num_taps - 1, 3, 2)), x])
        out = [(padded[t : t + num_taps] * weight).sum(0) + bias for t in range(len(x))]
        return np.stack(out), padded[len(x) :]

    def function(x, states, rows):
        return causal_conv(x, jnp.asarray(weight), jnp.asarray(bias), states, rows)

    check(
        function, reference, lambda rng, n: rng.normal(size=(n, 3, 2)), (num_taps - 1, 3, 2), seed
    )


@pytest.mark.parametrize("seed", range(2))
def test_selective_scan(seed: int) -> None:
    D, N = 3, 4
    a = -np.exp(np.random.default_rng(seed).normal(size=(D, N)))

    def make(rng, n):
        x, dt, b, c = (rng.normal(size=(n, size)) for size in (D, D, N, N))
        return ScanInputs(x, softplus(dt), b, c)

    def reference(inputs):
        h, out = np.zeros((D, N)), []
        for x, dt, b, c in zip(*inputs, strict=True):
            h = np.exp(dt[:, None] * a) * h + (dt * x)[:, None] * b
            out.append(h @ c)
        return np.stack(out), h

    check(
        lambda inputs, states, rows: selective_scan(
            inputs, jnp.asarray(a, jnp.float32), states, rows
        ),
        reference,
        make,
        (D, N),
        seed,
    )


@pytest.mark.parametrize("groups", [1, 2])
def test_head_scan(groups: int) -> None:
    G, Q, P, N = groups, 3, 2, 4
    a = -np.exp(np.random.default_rng(groups).normal(size=(G, Q)))

    def make(rng, n):
        shapes = ((n, G, Q, P), (n, G, Q), (n, G, N), (n, G, N))
        x, dt, b, c = (rng.normal(size=shape) for shape in shapes)
        return HeadScanInputs(x, softplus(dt), b, c)

    def reference(inputs):
        h, out = np.zeros((G, Q, P, N)), []
        for x, dt, b, c in zip(*inputs, strict=True):
            h = np.exp(dt * a)[..., None, None] * h
            h = h + np.einsum("gq,gqp,gn->gqpn", dt, x, b)
            out.append(np.einsum("gqpn,gn->gqp", h, c))
        return np.stack(out), h

    check(
        lambda inputs, states, rows: head_scan(inputs, jnp.asarray(a, jnp.float32), states, rows),
        reference,
        make,
        (G, Q, P, N),
        groups,
    )


@pytest.mark.parametrize("channels", [False, True], ids=["one_decay", "decay_by_channel"])
@pytest.mark.parametrize("groups", [1, 2])
def test_gated_delta(groups: int, channels: bool) -> None:
    G, Q, K, V = groups, 2, 4, 3

    def make(rng, n):
        q, k = (rng.normal(size=(n, G, K)) for _ in "qk")
        k /= np.linalg.norm(k, axis=-1, keepdims=True)
        log_decay = -softplus(rng.normal(size=(n, G, Q, K if channels else 1)))
        beta = 2 / (1 + np.exp(-rng.normal(size=(n, G, Q))))
        return DeltaInputs(q, k, rng.normal(size=(n, G, Q, V)), log_decay, beta)

    def reference(inputs):
        s, out = np.zeros((G, Q, K, V)), []
        for q, k, v, log_decay, beta in zip(*inputs, strict=True):
            s = np.exp(log_decay)[..., None] * s
            new = beta[..., None] * (v - np.einsum("gk,gqkv->gqv", k, s))
            s = s + np.einsum("gk,gqv->gqkv", k, new)
            out.append(np.einsum("gk,gqkv->gqv", q, s))
        return np.stack(out), s

    check(gated_delta, reference, make, (G, Q, K, V), groups)
