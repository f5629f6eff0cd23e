"""The KV cache update: right slots, nothing else touched, in place."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels_pallas import kv_cache_update

PAGES, KV_HEADS, PAGE_SIZE, HEAD_SIZE, TOKENS = 7, 3, 4, 8, 9


@pytest.mark.parametrize("implementation", ["xla", "reference"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@given(
    slots=st.lists(st.integers(PAGE_SIZE, PAGES * PAGE_SIZE - 1), max_size=TOKENS, unique=True),
    seed=st.integers(0, 2**31),
)
@settings(max_examples=15, deadline=None)
def test_writes_the_named_slots_only(implementation, dtype, slots, seed):
    rng = np.random.default_rng(seed)
    old = [rng.normal(size=(PAGES, KV_HEADS, PAGE_SIZE, HEAD_SIZE)) for _ in range(2)]
    new = [rng.normal(size=(TOKENS, KV_HEADS, HEAD_SIZE)) for _ in range(2)]
    pages = tuple(jnp.asarray(x, dtype) for x in old)
    k_tkh, v_tkh = (jnp.asarray(x, dtype) for x in new)
    # Padding tokens all go to slot 0.
    slot_mapping = np.array(slots + [0] * (TOKENS - len(slots)), np.int32)
    updated = kv_cache_update(
        pages, k_tkh, v_tkh, jnp.asarray(slot_mapping), implementation=implementation
    )
    for result, before, written in zip(updated, pages, (k_tkh, v_tkh), strict=True):
        expected = np.array(before).transpose(0, 2, 1, 3).reshape(-1, KV_HEADS, HEAD_SIZE)
        expected[slots] = np.asarray(written)[: len(slots)]
        got = np.asarray(result).transpose(0, 2, 1, 3).reshape(-1, KV_HEADS, HEAD_SIZE)
        np.testing.assert_array_equal(got[1:], expected[1:])


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32, jnp.float16])
def test_updates_in_place_whatever_the_size_of_the_cache(dtype):
    def compile_update(num_pages):
        pages = jax.ShapeDtypeStruct((num_pages, 3, 16, 64), dtype)
        new = jax.ShapeDtypeStruct((64, 3, 64), dtype)
        slots = jax.ShapeDtypeStruct((64,), jnp.int32)
        update = jax.jit(kv_cache_update, donate_argnums=0)
        return update.lower((pages, pages), new, new, slots).compile()

    small, large = (compile_update(n).memory_analysis() for n in (100, 10_000))
    cache_bytes = 2 * 10_000 * 3 * 16 * 64 * jnp.dtype(dtype).itemsize
    assert large.alias_size_in_bytes == cache_bytes
    assert large.temp_size_in_bytes == small.temp_size_in_bytes
    assert large.temp_size_in_bytes < 1 << 20


def test_donated_pages_keep_their_buffer():
    pages = tuple(jnp.zeros((8, 2, 4, 8), jnp.bfloat16) for _ in range(2))
    before = [x.unsafe_buffer_pointer() for x in pages]
    new = jnp.ones((3, 2, 8), jnp.bfloat16)
    slots = jnp.array([4, 5, 6], jnp.int32)
    after = jax.jit(kv_cache_update, donate_argnums=0)(pages, new, new, slots)
    assert [x.unsafe_buffer_pointer() for x in after] == before


def call(**changes):
    arguments = {
        "kv_pages": (jnp.zeros((3, 2, 4, 8)), jnp.zeros((3, 2, 4, 8))),
        "k_tkh": jnp.zeros((5, 2, 8)),
        "v_tkh": jnp.zeros((5, 2, 8)),
        "slot_mapping": jnp.zeros(5, jnp.int32),
    }
    return kv_cache_update(**(arguments | changes))


@pytest.mark.parametrize(
    ("message", "changes"),
    [
        ("kv_pages must be a pair", {"kv_pages": (jnp.zeros((3, 2, 4, 8)),)}),
        (
            "kv_pages: v_pages must have shape",
            {"kv_pages": (jnp.zeros((3, 2, 4, 8)), jnp.zeros(3))},
        ),
        (r"k_tkh must have shape .*\(5, 2, 8\).*got \(5, 3, 8\)", {"k_tkh": jnp.zeros((5, 3, 8))}),
        ("v_tkh must have the dtype of v_pages", {"v_tkh": jnp.zeros((5, 2, 8), jnp.bfloat16)}),
        ("slot_mapping must be int32", {"slot_mapping": jnp.zeros(5)}),
        ("implementation must be one of", {"implementation": "cuda"}),
    ],
)
def test_refuses(message, changes):
    with pytest.raises(ValueError, match=message):
        call(**changes)
