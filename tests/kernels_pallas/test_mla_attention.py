"""Latent attention, reference and XLA, against ordinary attention over expanded keys and values in float64."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

from kernels_pallas import mla_attention, mla_cache_update
from tests.kernels_pallas.mla_cases import MlaCase, errors, exact, make_batch

TOLERANCE = {"float32": 1e-5, "bfloat16": 1e-2, "float16": 1e-2}

CASES = {
    "decode": MlaCase([(130, 1), (0, 0), (1, 1), (64, 1)], decode_only=True),
    "chunks": MlaCase([(90, 20), (33, 33), (300, 2)], heads=3, padding_tokens=4),
    "mixed": MlaCase([(200, 1), (70, 9), (5, 1), (0, 0)], page_size=4, padding_tokens=3),
    "long_chunk": MlaCase([(700, 5), (1200, 150)], heads=8, page_size=32),
    "real_sizes": MlaCase([(150, 1), (100, 4)], heads=16, rank=512, rope=64, page_size=64),
    "half": MlaCase([(150, 1), (100, 30)], heads=8, dtype="bfloat16"),
    "other_half": MlaCase([(150, 1), (100, 30)], heads=8, dtype="float16"),
}


@functools.cache
def compiled(scale, decode_only):
    return jax.jit(
        functools.partial(mla_attention, scale=scale, decode_only=decode_only, return_lse=True)
    )


def run(case, batch, implementation=None):
    if implementation is None:
        return compiled(case.scale, case.decode_only)(*batch.arrays)
    return mla_attention(
        *batch.arrays,
        scale=case.scale,
        decode_only=case.decode_only,
        return_lse=True,
        implementation=implementation,
    )


@pytest.mark.parametrize("implementation", [None, "reference"])
@pytest.mark.parametrize("name", CASES)
def test_equals_attention_over_expanded_keys_and_values(name, implementation):
    case = CASES[name]
    batch = make_batch(case)
    out, lse = run(case, batch, implementation)
    assert out.dtype == case.dtype
    assert lse.dtype == jnp.float32
    found = errors(case, batch, out, lse)
    assert max(found.values()) < TOLERANCE[case.dtype], found
    assert not exact(out)[~batch.owned].any()


def test_double_precision_is_kept():
    with jax.enable_x64(True):
        case = MlaCase([(90, 1), (40, 1)], dtype="float64", decode_only=True)
        batch = make_batch(case)
        out, lse = run(case, batch)
        assert max(errors(case, batch, out, lse).values()) < 1e-12


def test_without_lse_the_result_is_one_array():
    case = CASES["decode"]
    batch = make_batch(case)
    options = {"scale": case.scale, "decode_only": True, "implementation": "reference"}
    out = mla_attention(*batch.arrays, **options)
    np.testing.assert_array_equal(out, run(case, batch, "reference")[0])
    shape = jax.eval_shape(functools.partial(mla_attention, scale=1.0), *batch.arrays)
    assert shape.shape == out.shape


ROW = st.one_of(
    st.integers(1, 150).map(lambda seq_len: (seq_len, 1)),
    st.tuples(st.integers(0, 120), st.integers(2, 40)).map(lambda x: (x[0] + x[1], x[1])),
)


@pytest.mark.jax_floor
@settings(max_examples=12, deadline=None, derandomize=True)
@given(rows=st.lists(ROW, min_size=1, max_size=4), seed=st.integers(0, 2**16))
def test_random_batches_equal_the_reference(rows, seed):
    # One shape for all, so that the program is compiled once.
    tokens = sum(query_len for _, query_len in rows)
    case = MlaCase(
        rows + [(0, 0)] * (4 - len(rows)), padding_tokens=160 - tokens, seed=seed, pages_per_row=12
    )
    batch = make_batch(case)
    num_pages = 44
    pages = jnp.full((num_pages, *batch.arrays[2].shape[1:]), jnp.nan)
    pages = pages.at[: len(batch.arrays[2])].set(batch.arrays[2])
    arrays = (*batch.arrays[:2], pages, *batch.arrays[3:])
    out, lse = compiled(case.scale, False)(*arrays)
    expected, expected_lse = mla_attention(
        *arrays, scale=case.scale, return_lse=True, implementation="reference"
    )
    np.testing.assert_allclose(out, expected, atol=1e-5, rtol=1e-5)
    np.testing.assert_allclose(lse, expected_lse, atol=1e-5, rtol=1e-5)


@pytest.mark.jax_floor
def test_heads_are_what_tensor_parallelism_shards():
    case = MlaCase([(70, 1), (50, 12)], heads=4)
    batch = make_batch(case)
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("model",))
    heads, whole = P(None, "model"), P()
    attend = functools.partial(mla_attention, scale=case.scale)
    sharded = jax.shard_map(
        attend, mesh=mesh, in_specs=(heads, heads, whole, whole, whole, whole), out_specs=heads
    )
    np.testing.assert_allclose(
        jax.jit(sharded)(*batch.arrays), run(case, batch)[0], atol=1e-6, rtol=1e-6
    )


def test_memory_does_not_grow_with_tokens_times_context():
    def temporaries(pages_per_row):
        shapes = (
            jax.ShapeDtypeStruct((256, 16, 512), jnp.bfloat16),
            jax.ShapeDtypeStruct((256, 16, 64), jnp.bfloat16),
            jax.ShapeDtypeStruct((4096, 16, 576), jnp.bfloat16),
            jax.ShapeDtypeStruct((8, pages_per_row), jnp.int32),
            jax.ShapeDtypeStruct((8,), jnp.int32),
            jax.ShapeDtypeStruct((9,), jnp.int32),
        )
        compiled = compiled_for(shapes)
        return compiled.memory_analysis().temp_size_in_bytes

    def compiled_for(shapes):
        return jax.jit(functools.partial(mla_attention, scale=1.0)).lower(*shapes).compile()

    # 16 times the context adds block tables, not scores.
    assert temporaries(4096) - temporaries(256) < 1 << 20


def test_cache_update_writes_the_slots_and_nothing_else():
    rng = np.random.default_rng(0)
    pages = rng.normal(size=(5, 4, 12)).astype(np.float32)
    latent, rope = (rng.normal(size=(3, n)).astype(np.float32) for n in (8, 4))
    slots = np.array([6, 0, 19], np.int32)
    expected = pages.copy()
    for token, slot in enumerate(slots):
        expected[slot // 4, slot % 4] = np.concatenate([latent[token], rope[token]])
    updated = mla_cache_update(*(jnp.asarray(x) for x in (pages, latent, rope, slots)))
    np.testing.assert_array_equal(updated, expected)


def test_cache_update_is_in_place_where_donated():
    shapes = (
        jax.ShapeDtypeStruct((1000, 16, 576), jnp.bfloat16),
        jax.ShapeDtypeStruct((8, 512), jnp.bfloat16),
        jax.ShapeDtypeStruct((8, 64), jnp.bfloat16),
        jax.ShapeDtypeStruct((8,), jnp.int32),
    )
    compiled = jax.jit(mla_cache_update, donate_argnums=0).lower(*shapes).compile()
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes == 1000 * 16 * 576 * 2
    assert memory.temp_size_in_bytes < 1 << 20
    assert not re.search(r"bf16\[(1000,16|16000),576\]\S* copy\(", compiled.as_text())
