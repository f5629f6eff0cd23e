"""The KV cache update: right slots, nothing else touched, in place."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels_pallas import kv_cache_update
from kernels_pallas.quantized_pages import widen

INT8 = jnp.zeros((3, 2, 4, 8), jnp.int8)
PAGES, KV_HEADS, PAGE_SIZE, HEAD_SIZE, TOKENS = 7, 3, 4, 8, 9

pytestmark = pytest.mark.jax_floor


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


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float16", "uint8", "int8"])
def test_updates_in_place_whatever_the_size_of_the_cache(dtype):
    def compile_update(num_pages):
        pages = jax.ShapeDtypeStruct((num_pages, 3, 16, 64), dtype)
        scale = jax.ShapeDtypeStruct((3,), jnp.float32)
        quantized = dtype in ("uint8", "int8")
        new = jax.ShapeDtypeStruct((64, 3, 64), "bfloat16" if quantized else dtype)
        slots = jax.ShapeDtypeStruct((64,), jnp.int32)
        update = jax.jit(
            lambda *args, kv_scales: kv_cache_update(*args, kv_scales=kv_scales), donate_argnums=0
        )
        kv_scales = (scale, scale) if quantized else None
        return update.lower((pages, pages), new, new, slots, kv_scales=kv_scales).compile()

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


@pytest.mark.parametrize("implementation", ["xla", "reference"])
def test_8_bit_pages_get_the_nearest_number_ties_to_even_and_saturate(implementation):
    inf, nan = np.inf, np.nan
    numbers = {
        "float8_e4m3fn": {
            1.0625: 1.0, 1.1875: 1.25, -1.0625: -1.0, 1.07: 1.125, 460.0: 448.0, inf: 448.0,
            -inf: -448.0, nan: nan, 2.0**-10: 0.0, 3 * 2.0**-10: 2.0**-8, 0.3: 0.3125,
        },
        "int8": {
            0.5: 0, 1.5: 2, 2.5: 2, -0.5: 0, -3.5: -4, 127.5: 127, -128.0: -127, inf: 127,
            -inf: -127, nan: 0, 41.2: 41,
        },
    }  # fmt: skip
    numbers["uint8"] = numbers["float8_e4m3fn"]
    for dtype, wanted in numbers.items():
        x = np.array(list(wanted), np.float32)
        pages = tuple(jnp.zeros((3, 2, 4, len(x)), dtype) for _ in range(2))
        k_scale, v_scale = np.float32([0.25, 4]), np.float32([0.5, 1])
        k_tkh, v_tkh = (jnp.asarray(x * s[:, None])[None] for s in (k_scale, v_scale))
        updated = kv_cache_update(
            pages,
            k_tkh,
            v_tkh,
            jnp.array([5], jnp.int32),
            kv_scales=(jnp.asarray(k_scale), jnp.asarray(v_scale)),
            implementation=implementation,
        )
        expected = np.float32(list(wanted.values()))
        for result in updated:
            assert result.dtype == dtype
            result = np.asarray(widen(result, jnp.float32))
            np.testing.assert_array_equal(result[1, :, 1], [expected, expected])
            assert np.count_nonzero(result) == np.count_nonzero(result[1, :, 1])


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "int8"])
def test_every_number_of_an_8_bit_type_comes_back_as_itself(dtype):
    codes = jnp.arange(256, dtype=jnp.uint8)
    numbers = jax.lax.bitcast_convert_type(codes, jnp.dtype(dtype))
    if dtype == "int8":
        numbers = numbers[numbers != -128]
    pages = (jnp.zeros((1, 1, 1, numbers.size), dtype),) * 2
    for compute in (jnp.bfloat16, jnp.float32):
        new = numbers.astype(compute)[None, None]
        (k_pages, _) = kv_cache_update(
            pages, new, new, jnp.zeros(1, jnp.int32), kv_scales=(jnp.ones(1),) * 2
        )
        assert np.asarray(k_pages).tobytes() == np.asarray(numbers).tobytes()


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
        ("kv_scales must be given for pages of int8", {"kv_pages": (INT8, INT8)}),
        ("kv_scales must be None unless", {"kv_scales": (jnp.ones(2), jnp.ones(2))}),
        (
            "k_tkh must be floating for k_pages of int8, got int32",
            {"kv_pages": (INT8, INT8), "k_tkh": jnp.zeros((5, 2, 8), jnp.int32)},
        ),
        ("implementation must be one of", {"implementation": "cuda"}),
    ],
)
def test_refuses(message, changes):
    with pytest.raises(ValueError, match=message):
        call(**changes)
