"""Norm, rotation and cache write in one operation: every backend against float64, the Mosaic kernel without a GPU."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas import rope_kv_cache_update
from kernels_pallas.compile_job import run_job
from tests.gpu_compiler import needs_compiler
from tests.kernels_pallas import rope_kv_cache_update_jobs as jobs
from tests.kernels_pallas.mosaic_runs import LONG, QUICK_TO_COMPILE


def job(function: str, env: dict | None = None, **arguments: Any) -> Any:
    return run_job(f"{jobs.__name__}:{function}", arguments, timeout=400, env=env)


def shape(tokens=7, kv_heads=2, queries=3, head_size=64, page_size=16, **more: Any):
    sizes = {"tokens": tokens, "kv_heads": kv_heads, "queries": queries}
    return sizes | {"head_size": head_size, "page_size": page_size} | more


SHAPES = [
    shape(),
    shape(kv_heads=8, queries=4, head_size=128, page_size=64),
    shape(kv_heads=8, queries=4, head_size=64, page_size=32, dtype="float16"),
    shape(kv_heads=8, queries=8, head_size=128, page_size=128),
    shape(kv_heads=2, queries=8, head_size=128, norm=1),
    shape(kv_heads=1, queries=4, head_size=256, norm=1, norm_weight_offset=1.0),
    shape(kv_heads=8, queries=2, head_size=256, norm=1, norm_weight_offset=1.0),
    shape(kv_heads=3, queries=3, head_size=64),
    shape(kv_heads=4, queries=1, head_size=80, rotated=32),
    shape(kv_heads=32, queries=1, head_size=96),
    shape(kv_heads=4, queries=4, head_size=128, rotated=32),
    shape(kv_heads=2, queries=4, head_size=128, rotated=32, norm=1),
    shape(kv_heads=4, queries=2, head_size=128, dtype="float32", norm=1),
    shape(kv_heads=8, queries=16, head_size=128),
    shape(kv_heads=4, queries=7, head_size=128),
]

QUANTIZED_SHAPES = [
    shape(kv_dtype="float8_e4m3fn"),
    shape(kv_dtype="int8", norm=1),
    shape(kv_heads=8, queries=4, head_size=128, page_size=64, kv_dtype="float8_e4m3fn"),
    shape(kv_heads=8, queries=2, head_size=256, norm=1, kv_dtype="float8_e4m3fn"),
    shape(kv_heads=8, queries=1, head_size=80, rotated=32, kv_dtype="int8"),
    shape(kv_heads=32, queries=1, head_size=96, dtype="float16", kv_dtype="float8_e4m3fn"),
    shape(kv_heads=4, queries=2, head_size=128, rotated=32, dtype="float32", kv_dtype="int8"),
]
"""Families' heads: SmolLM, Llama 8B, 1B, 70B and a quarter of it, Gemma, Phi, rotary of a part, 405B, Qwen."""


def tolerance(case: dict[str, Any]) -> float:
    """Half a unit of the pages' last place, and float32's own error."""
    rounding = {"bfloat16": 2**-8, "float16": 2**-11, "float32": 0}
    return rounding[case.get("dtype", "bfloat16")] + 1e-6


ALL = SHAPES + QUANTIZED_SHAPES
# Of the way into pages that are not, and that are 8 bits wide: a norm, an offset of its weights, a rotary part, each of the
# dtypes, key heads in one and in two rounds, an odd number of them.
FEW = [SHAPES[i] for i in (0, 2, 5, 7, 8, 9, 11, 12)] + [QUANTIZED_SHAPES[i] for i in (1, 3, 4, 5)]


@pytest.mark.parametrize("case", ALL, ids=str)
@pytest.mark.parametrize("implementation", ["xla", "reference"])
def test_matches_float64_and_touches_no_other_slot(implementation, case):
    check_on_the_cpu(case, implementation)


@pytest.mark.jax_floor
@pytest.mark.parametrize("case", [SHAPES[4], QUANTIZED_SHAPES[1]], ids=str)
def test_the_choice_of_a_cpu_matches_float64(case):
    check_on_the_cpu(case, None)


def check_on_the_cpu(case: dict[str, Any], implementation: str | None) -> None:
    args, options = jobs.inputs(case)
    *args_first, q_norm, k_norm, kv_scales = jax.tree.map(jnp.asarray, args)
    run = partial(rope_kv_cache_update, implementation=implementation, **options)
    if implementation != "reference":
        run = jax.jit(run)
    results = run(*args_first, q_norm=q_norm, k_norm=k_norm, kv_scales=kv_scales)
    assert jobs.check(case, results, args, options) <= tolerance(case)


@pytest.mark.jax_floor
def test_the_kernel_interpreted_matches_float64_and_has_no_races():
    # One page size after the other for each shape, so that every family meets another one.
    sizes = (16, 32, 64, 128)
    cases = [case | {"page_size": sizes[i % 4]} for i, case in enumerate(ALL if LONG else FEW)]
    errors = job("interpret", QUICK_TO_COMPILE, cases=cases)
    assert all(e <= tolerance(c) for e, c in zip(errors, cases, strict=True)), errors


def test_planted_faults_are_caught():
    outcomes = job("faults", QUICK_TO_COMPILE, case=shape(tokens=5, norm=1))
    assert outcomes.keys() == jobs.FAULTS.keys()
    assert all(outcome != "right" for outcome in outcomes.values()), outcomes
    for name in ("values not waited for", "queries and keys not waited for"):
        assert outcomes[name] == "race", outcomes
    assert outcomes["registers' stores not committed"] == "race"


def test_planted_faults_on_the_way_into_8_bits_are_caught():
    # 40 kv heads of this size take two rounds.
    case = shape(tokens=3, kv_heads=40, head_size=256, queries=1, kv_dtype="float8_e4m3fn")
    outcomes = job("faults", QUICK_TO_COMPILE, case=case)
    assert outcomes.keys() == jobs.QUANTIZED_FAULTS.keys()
    assert all(outcome != "right" for outcome in outcomes.values()), outcomes


@needs_compiler
def test_compiled_for_the_h200_it_is_one_kernel_beside_the_slots_in_place_without_spills():
    cases = ALL if LONG else FEW
    for case, result in zip(cases, job("compile_for_h200", cases=cases), strict=True):
        *slots, kernel = result["kernels"]
        assert (kernel, len(slots)) == ("mosaic_gpu_v2", 1), case
        assert result["alias"] == result["cache"], case
        assert result["temporaries"] < 4096, case
        assert (result["moved"], result["spilled"]) == ([], 0), case
        assert max(result["registers"]) <= 128, case
        assert (result["tma_loads"], result["proxy_fences"]) == (3, 1), case


@needs_compiler
def test_shapes_that_the_kernel_cannot_do_fall_back_to_xla_in_place():
    cases = [shape(kv_heads=1, head_size=96), shape(rotated=30, norm=1)]
    for result in job("compile_for_h200", cases=cases):
        assert "mosaic_gpu_v2" not in result["kernels"]
        assert result["alias"] == result["cache"]
        assert result["moved"] == []


def test_a_cpu_never_imports_pallas():
    assert job("modules_imported_on_cpu") == []


@pytest.mark.jax_floor
def test_updates_in_place_on_cpu():
    pages = tuple(jnp.zeros((8, 2, 4, 8), jnp.bfloat16) for _ in range(2))
    before = [x.unsafe_buffer_pointer() for x in pages]
    slots, angles = jnp.array([4, 5, 6], jnp.int32), jnp.ones((3, 4))
    run = jax.jit(rope_kv_cache_update, donate_argnums=1)
    _, after = run(jnp.ones((3, 2, 5, 8)), pages, slots, angles, angles)
    assert [x.unsafe_buffer_pointer() for x in after] == before


@pytest.mark.parametrize(
    ("message", "changes"),
    [
        (r"qkv must be floating \[T, K, G \+ 2, H\]", {"qkv": jnp.zeros((5, 2, 2, 8))}),
        ("kv_pages must be a pair", {"kv_pages": (jnp.zeros((3, 2, 4, 8)),)}),
        (
            r"k_pages must have shape \[num_pages, 2, page_size, 8\]",
            {"kv_pages": (jnp.zeros((3, 1, 4, 8)), jnp.zeros((3, 2, 4, 8)))},
        ),
        (
            "k_pages float32 .* and v_pages bfloat16 .* must agree",
            {"kv_pages": (jnp.zeros((3, 2, 4, 8)), jnp.zeros((3, 2, 4, 8), jnp.bfloat16))},
        ),
        (r"slot_mapping must be int32 \[5\]", {"slot_mapping": jnp.zeros(4, jnp.int32)}),
        ("slot_mapping must be int32", {"slot_mapping": jnp.zeros(5)}),
        ("cos must be float32", {"cos": jnp.zeros((5, 4), jnp.bfloat16)}),
        ("D from 2 to the head size 8", {"cos": jnp.zeros((5, 5)), "sin": jnp.zeros((5, 5))}),
        ("cos and sin must have one shape", {"sin": jnp.zeros((5, 3))}),
        ("q_norm and k_norm must both be given", {"q_norm": jnp.zeros(8)}),
        (r"k_norm must have shape \[8\]", {"q_norm": jnp.zeros(8), "k_norm": jnp.zeros(4)}),
        ("kv_scales must be None unless", {"kv_scales": (jnp.ones(2), jnp.ones(2))}),
        (
            "kv_scales must be given for pages of int8",
            {"kv_pages": (jnp.zeros((3, 2, 4, 8), jnp.int8),) * 2},
        ),
        ("norm_eps must be finite", {"norm_eps": -1.0}),
        ("implementation must be one of", {"implementation": "cuda"}),
    ],
)
def test_refuses(message, changes):
    arguments = {
        "qkv": jnp.zeros((5, 2, 5, 8)),
        "kv_pages": (jnp.zeros((3, 2, 4, 8)), jnp.zeros((3, 2, 4, 8))),
        "slot_mapping": jnp.zeros(5, jnp.int32),
        "cos": jnp.zeros((5, 4)),
        "sin": jnp.zeros((5, 4)),
    }
    with pytest.raises(ValueError, match=message):
        rope_kv_cache_update(**(arguments | changes))


@pytest.mark.parametrize(
    ("message", "sizes"),
    [
        ("keys of 96 elements must take a multiple of 128 bytes, got 192", (1, 4, 96, 96)),
        ("head size must be a multiple of 8 up to 256, got 320", (8, 4, 320, 320)),
        ("at most 256 query heads", (8, 64, 128, 128)),
        ("halves of an even size", (8, 4, 64, 30)),
    ],
)
def test_the_kernel_says_what_it_cannot_do(message, sizes):
    kv_heads, queries, head_size, rotated = sizes
    pages = jax.ShapeDtypeStruct((3, kv_heads, 16, head_size), jnp.bfloat16)
    angles = jax.ShapeDtypeStruct((2, rotated // 2), jnp.float32)
    run = partial(rope_kv_cache_update, implementation="mosaic_gpu")
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(
            run,
            jax.ShapeDtypeStruct((2, kv_heads, queries + 2, head_size), jnp.bfloat16),
            (pages, pages),
            jax.ShapeDtypeStruct((2,), np.int32),
            angles,
            angles,
        )
