"""The sampling program: greedy, seeds, masks, NaN, and what may not change a row's token."""

import functools

import jax
import numpy as np
import pytest

from jaxinfer.engine.plan import TokenMask
from jaxinfer.executor.sampler import sample
from jaxinfer.executor.sampler_features import SamplerFeatures, SamplerLevel, all_features
from jaxinfer.executor.sampler_state import SamplerState
from jaxinfer.executor.sampling_rows import SamplingRows
from jaxinfer.sampling_params import SamplingParams

V = 100
PROMPT = np.arange(4)
jitted_sample = jax.jit(sample, static_argnames="features", donate_argnums=2)


def logits_of(R, scale=3, V=V):
    return (np.random.default_rng(5).standard_normal((R, V)) * scale).astype(np.float32)


def make_rows(params, max_num_seqs=None, seed=0, V=V):
    rows = SamplingRows(max_num_seqs or len(params), V, seed=seed)
    for row, param in enumerate(params):
        rows.set_row(row, param, PROMPT, len(PROMPT))
    return rows


def run(logits, rows, order=None, positions=9, mask=None, num_rows=None):
    """Token ids and invalid flags of the rows in `order`."""
    order = np.arange(len(logits)) if order is None else np.asarray(order)
    n, R = len(order), num_rows or len(order)
    samples = np.ones(n, bool)
    features = rows.features(order, samples, masked=mask is not None)
    state = SamplerState(rows.max_num_seqs, rows.vocab_size)
    if features.level is SamplerLevel.FULL:
        state.update(rows)
    padded = np.full((R, logits.shape[1]), np.nan, np.float32)
    padded[:n] = logits
    out, _ = jitted_sample(
        padded,
        rows.gather(order, np.broadcast_to(positions, n), samples, R),
        state.arrays,
        rows.mask_words(mask, R) if features.masked else None,
        features=features,
    )
    return np.asarray(out.token_ids)[:n], np.asarray(out.invalid)[:n]


GREEDY = SamplingParams(temperature=0)


def test_greedy_is_the_first_argmax():
    logits = np.round(logits_of(16))  # many ties
    tokens, invalid = run(logits, make_rows([GREEDY] * 16))
    np.testing.assert_array_equal(tokens, logits.argmax(axis=1))
    assert not invalid.any()


def test_greedy_rows_stay_exact_among_random_ones():
    logits = logits_of(16, scale=0.1)
    params = [
        SamplingParams(temperature=0, top_p=0.5, top_k=3) if r % 2 else SamplingParams(seed=r)
        for r in range(16)
    ]
    tokens, _ = run(logits, make_rows(params))
    np.testing.assert_array_equal(tokens[1::2], logits.argmax(axis=1)[1::2])
    assert (tokens[::2] != logits.argmax(axis=1)[::2]).any()


SEEDED = [
    SamplingParams(seed=seed, **filters)
    for seed, filters in enumerate(
        [{}, {"top_k": 9}, {"top_p": 0.9}, {"min_p": 0.02}, {"top_k": 20, "top_p": 0.7}, {}] * 2
    )
]


def test_a_seeded_token_does_not_depend_on_its_company():
    """Neither on the row, the order, the bucket, nor on what the other rows need (the hot row makes
    the filter search the whole vocabulary)."""
    vocab_size, n = 12288, len(SEEDED)
    logits = logits_of(n, V=vocab_size)
    rows = make_rows([*SEEDED, SamplingParams(temperature=9.0, top_p=0.99)], 32, V=vocab_size)
    together, _ = run(logits, rows, num_rows=16)
    for r in range(n):
        tokens, _ = run(logits[[r, 0]], rows, order=[r, n])
        assert tokens[0] == together[r]
    order = np.random.default_rng(0).permutation(n)
    shuffled, _ = run(logits[order], rows, order=order, num_rows=16)
    np.testing.assert_array_equal(shuffled, together[order])
    moved = SamplingRows(64, vocab_size, seed=99)
    for r, params in enumerate(SEEDED):
        moved.set_row(40 - r, params, PROMPT, len(PROMPT))
    tokens, _ = run(logits, moved, order=40 - np.arange(n), num_rows=16)
    np.testing.assert_array_equal(tokens, together)


def test_position_and_seed_make_the_randomness():
    logits = np.zeros((64, V), np.float32)
    rows = make_rows([SamplingParams(seed=3)] * 64)
    same, _ = run(logits, rows)
    assert len(set(same)) == 1
    over_positions, _ = run(logits, rows, positions=np.arange(64))
    assert len(set(over_positions)) > 30
    wide = make_rows([SamplingParams(seed=3 + (r << 32)) for r in range(64)])
    over_high_words, _ = run(logits, wide)
    assert len(set(over_high_words)) > 30


def test_unseeded_requests_differ_and_repeat_with_the_engine_seed():
    logits = np.zeros((64, V), np.float32)
    tokens = [run(logits, make_rows([SamplingParams()] * 64, seed=s))[0] for s in (1, 1, 2)]
    assert len(set(tokens[0])) > 30
    np.testing.assert_array_equal(tokens[0], tokens[1])
    assert (tokens[0] != tokens[2]).any()


@pytest.mark.parametrize(
    "params",
    [GREEDY, SamplingParams(top_p=0.9), SamplingParams(temperature=0, repetition_penalty=1.2)],
)
@pytest.mark.parametrize("where", [0, 57, V - 1])
def test_nan_spoils_only_its_row(params, where):
    logits = logits_of(8)
    rows = make_rows([msgspec_copy(params, seed=r) for r in range(8)])
    clean, _ = run(logits, rows)
    rows = make_rows([msgspec_copy(params, seed=r) for r in range(8)])
    logits[3, where] = np.nan
    mask = TokenMask(np.array([3]), np.zeros((1, -(-V // 32)), np.uint32))
    mask.words[0, 0] = 2
    for given in (None, mask):  # also where the mask hides the NaN
        tokens, invalid = run(logits, rows, mask=given)
        np.testing.assert_array_equal(np.flatnonzero(invalid), [3])
        np.testing.assert_array_equal(np.delete(tokens, 3), np.delete(clean, 3))


def msgspec_copy(params, **changes):
    values = {name: getattr(params, name) for name in params.__struct_fields__}
    return SamplingParams(**{**values, **changes})


def words_of(allowed):
    bits = np.zeros((len(allowed), -(-V // 32) * 32), np.uint8)
    bits[:, :V] = allowed
    return np.packbits(bits, axis=1, bitorder="little").view(np.uint32)


@pytest.mark.parametrize("params", [GREEDY, SamplingParams(temperature=5.0, top_k=50)])
def test_masked_tokens_are_never_chosen(params):
    R = 64
    allowed = np.random.default_rng(1).random((R // 2, V)) < 0.1
    allowed[:, 99] = True
    mask = TokenMask(np.arange(0, R, 2), words_of(allowed))
    logits = logits_of(R)
    tokens, invalid = run(logits, make_rows([params] * R), mask=mask)
    assert allowed[np.arange(R // 2), tokens[::2]].all()
    assert not invalid.any()
    if params.greedy:
        expected = np.where(allowed, logits[::2], -np.inf).argmax(axis=1)
        np.testing.assert_array_equal(tokens[::2], expected)
        np.testing.assert_array_equal(tokens[1::2], logits[1::2].argmax(axis=1))


def test_a_row_with_no_token_left_is_invalid():
    mask = TokenMask(np.array([1]), words_of(np.zeros((1, V), bool)))
    _, invalid = run(logits_of(4), make_rows([SamplingParams(seed=1)] * 4), mask=mask)
    np.testing.assert_array_equal(invalid, [False, True, False, False])


def test_parameters_do_not_recompile():
    # A function of its own: jits of the same function share their cache.
    compiled = jax.jit(
        lambda *args, features: sample(*args, features=features), static_argnames="features"
    )
    rng = np.random.default_rng(3)
    for step in range(20):
        params = [
            SamplingParams(
                temperature=float(rng.uniform(0.1, 2)),
                top_k=int(rng.integers(0, V)),
                top_p=float(rng.uniform(0.1, 1)),
                min_p=float(rng.uniform(0, 0.5)),
                seed=int(rng.integers(2**62)),
            )
            for _ in range(4)
        ]
        rows, order = make_rows(params), np.arange(4)
        features = rows.features(order, order >= 0, masked=False)
        packed = rows.gather(order, order + step, order >= 0, 4)
        compiled(logits_of(4), packed, None, None, features=features)
    assert compiled._cache_size() == 1


@functools.cache
def compiled_full(S, vocab_size):
    features = SamplerFeatures(SamplerLevel.FULL, True)
    state = SamplerState(S, vocab_size).abstract()
    shapes = (
        jax.ShapeDtypeStruct((4, vocab_size), np.float32),
        jax.ShapeDtypeStruct((4, 12), np.int32),
        state,
        jax.ShapeDtypeStruct((4, vocab_size // 32), np.uint32),
    )
    program = functools.partial(sample, features=features)
    return jax.jit(program, donate_argnums=2).lower(*shapes).compile(), state


def test_the_state_is_updated_in_place():
    S, vocab_size = 512, 4096
    program, state = compiled_full(S, vocab_size)
    memory = program.memory_analysis()
    nbytes = sum(x.size * x.dtype.itemsize for x in state)
    assert memory.alias_size_in_bytes == nbytes
    assert memory.temp_size_in_bytes < nbytes / 2


def test_variants_are_few_and_cover_what_rows_ask_for():
    variants = all_features(20, V)
    assert len(set(variants)) == len(variants) == 6
    rows = make_rows(
        [
            GREEDY,
            SamplingParams(),
            SamplingParams(logprobs=3),
            SamplingParams(presence_penalty=1),
            SamplingParams(logit_bias=dict.fromkeys(range(17), 1.0), logprobs=0),
        ]
    )
    every = np.ones(1, bool)
    for row in range(5):
        for masked in (False, True):
            features = rows.features(np.array([row]), every, masked=masked)
            assert features in variants
    assert rows.features(np.array([0, 4]), np.array([True, False]), masked=False).level == 0
    assert rows.features(np.array([0]), ~every, masked=False) is None
