"""Penalties and logit_bias against numpy, over steps that feed their own counts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.executor.penalties import apply_penalties, count_tokens
from jaxinfer.executor.program_cache import CompileGuard
from jaxinfer.executor.sampler import sample
from jaxinfer.executor.sampler_state import SamplerState
from jaxinfer.executor.sampling_rows import MAX_COUNT, SamplingRows, token_states
from jaxinfer.sampling_params import SamplingParams

V = 50
GREEDY = SamplingParams(temperature=0)
jitted_sample = jax.jit(sample, static_argnames="features", donate_argnums=2)


def reference(logits, params, prompt, output):
    """As the API's documents define it, token by token."""
    x = logits.astype(np.float64).copy()
    for token, bias in (params.logit_bias or {}).items():
        x[token] += bias
    for token in range(V):
        count = output.count(token)
        if token in prompt or count:
            factor = params.repetition_penalty
            x[token] = x[token] / factor if x[token] > 0 else x[token] * factor
        x[token] -= params.frequency_penalty * count
        x[token] -= params.presence_penalty * (count > 0)
    return x


PARAMS = [
    SamplingParams(temperature=0, repetition_penalty=1.7),
    SamplingParams(temperature=0, presence_penalty=1.5),
    SamplingParams(temperature=0, frequency_penalty=0.8),
    SamplingParams(temperature=0, frequency_penalty=-0.7, repetition_penalty=0.8),
    SamplingParams(temperature=0, logit_bias={7: 4.0, 9: -100.0}),
    SamplingParams(temperature=0, logit_bias={3: 2.0}, presence_penalty=2.0),
    SamplingParams(temperature=0),
]


def step(logits, rows, state, order, samples, positions):
    features = rows.features(order, samples, masked=False)
    state.update(rows)
    out, state.arrays = jitted_sample(
        logits,
        rows.gather(order, positions, samples, len(logits)),
        state.arrays,
        rows.mask_words(None, len(logits)),
        features=features,
    )
    return np.asarray(out.token_ids)


def test_generation_follows_the_reference_through_a_preemption():
    rng = np.random.default_rng(0)
    R = len(PARAMS)
    rows, state = SamplingRows(16, V), SamplerState(16, V)
    slots = rng.permutation(16)[:R]
    prompts = [list(rng.integers(0, V, 6)) for _ in range(R)]
    outputs = [[] for _ in range(R)]
    for r in range(R):
        rows.set_row(slots[r], PARAMS[r], np.array(prompts[r]), 6)
    base = rng.standard_normal((R, V)).astype(np.float32) * 1.5
    for i in range(24):
        if i == 12:  # everyone comes back in another row, with what was generated
            slots = rng.permutation(16)[:R]
            for r in range(R):
                rows.set_row(slots[r], PARAMS[r], np.array(prompts[r] + outputs[r]), 6)
        logits = base + rng.standard_normal((R, V)).astype(np.float32) * 0.3
        order = rng.permutation(R)
        samples = rng.random(R) < 0.8  # the others are still in their prompt
        samples[0] = True
        tokens = step(logits[order], rows, state, slots[order], samples, np.full(R, 6 + i))
        for token, r, active in zip(tokens, order, samples, strict=True):
            if active:
                expected = reference(logits[r], PARAMS[r], prompts[r], outputs[r])
                assert token == expected.argmax(), (i, r)
                outputs[r].append(int(token))


def test_penalties_elementwise():
    rng = np.random.default_rng(1)
    logits = rng.standard_normal((3, V)).astype(np.float32)
    logits[:, 4] = -np.inf
    prompt, output = [1, 2, 2, 40], [2, 3, 3, 4, 49]
    params = SamplingParams(repetition_penalty=1.3, frequency_penalty=0.5, presence_penalty=-0.4)
    states = np.tile(token_states(np.array(prompt + output), 4, V), (3, 1))
    vectors = [np.full(3, v, np.float32) for v in (1.3, 0.5, -0.4)]
    got = np.asarray(apply_penalties(logits, states, *vectors))
    for r in range(3):
        np.testing.assert_allclose(
            got[r], reference(logits[r], params, prompt, output), rtol=1e-5, atol=1e-6
        )


def test_a_reused_row_forgets_its_former_request():
    rows, state = SamplingRows(2, V), SamplerState(2, V)
    logits = np.zeros((2, V), np.float32)
    logits[:, 5], logits[:, 6] = 1.0, 0.5
    order, both = np.arange(2), np.ones(2, bool)
    for params in (
        SamplingParams(temperature=0, logit_bias={6: 3.0}, presence_penalty=1.0),
        SamplingParams(temperature=0, presence_penalty=1.0),
    ):
        for row in range(2):
            rows.set_row(row, params, np.arange(2), 2)
        tokens = step(logits, rows, state, order, both, np.full(2, 2))
        np.testing.assert_array_equal(tokens, [6, 6] if params.logit_bias else [5, 5])


def test_a_later_admission_keeps_the_biases_of_other_rows():
    rows, state = SamplingRows(2, V), SamplerState(2, V)
    logits, order, both = np.zeros((2, V), np.float32), np.arange(2), np.ones(2, bool)
    rows.set_row(0, SamplingParams(temperature=0, logit_bias={8: 1.0}), np.arange(2), 2)
    rows.set_row(1, SamplingParams(temperature=0), np.arange(2), 2)
    narrow = step(logits, rows, state, order, both, np.full(2, 2))
    wide = {token: token / 10 for token in range(30)}
    rows.set_row(1, SamplingParams(temperature=0, logit_bias=wide), np.arange(2), 2)
    tokens = step(logits, rows, state, order, both, np.full(2, 3))
    np.testing.assert_array_equal(narrow, [8, 0])
    np.testing.assert_array_equal(tokens, [8, 29])
    nbytes = sum(x.nbytes for x in state.arrays)
    assert nbytes == state.nbytes


def test_no_update_compiles_after_compile_updates():
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("tensor",))
    everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    rows, state = SamplingRows(3, V), SamplerState(3, V, everywhere)
    state.compile_updates()
    assert state.arrays is None
    bias = SamplingParams(temperature=0, logit_bias={1: 1.0}, presence_penalty=1)
    wide = SamplingParams(temperature=0, logit_bias=dict.fromkeys(range(30), 1.0))
    steps = [[(0, bias)], [(1, bias), (0, GREEDY)], [(2, wide)], [(0, wide), (2, bias)]]
    logits, order, every = np.zeros((3, V), np.float32), np.arange(3), np.ones(3, bool)
    for admitted in steps:
        for row, params in admitted:
            rows.set_row(row, params, np.arange(2), 2)
        guard = CompileGuard()
        state.update(rows)
        assert guard.count == 0
        features = rows.features(order, every, masked=False)
        _, state.arrays = jitted_sample(
            logits,
            rows.gather(order, order + 2, every, 3),
            state.arrays,
            rows.mask_words(None, 3),
            features=features,
        )


def test_too_many_biases_are_refused():
    with pytest.raises(ValueError, match=r"logit_bias.*1025.*1024"):
        bias = dict.fromkeys(range(1025), 1.0)
        SamplingRows(1, 2000).set_row(0, SamplingParams(logit_bias=bias), np.arange(2), 2)


def test_counts_saturate_and_spare_the_prompt_bit():
    states = jnp.zeros((2, V), jnp.uint16).at[0, 3].set(0x8000 | MAX_COUNT)
    counted = np.asarray(
        count_tokens(states, np.array([0, 1]), np.array([3, 3]), np.array([True, False]))
    )
    assert counted[0, 3] == 0x8000 | int(MAX_COUNT)
    assert counted[1].sum() == 0
