"""Grouped matmul: every backend against float64, rows of no group, bad arguments, and what XLA makes of it."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas import QuantizedWeight, grouped_matmul
from kernels_pallas.compile_job import run_job
from kernels_pallas.quantized_matmul.weight import dequantize, pack
from tests.gpu_compiler import needs_compiler
from tests.kernels_pallas import grouped_matmul_jobs as jobs
from tests.kernels_pallas.mosaic_runs import QUICK_TO_COMPILE
from tests.kernels_pallas.quantized_weights import FORMATS, random_arrays

SIZES: dict[str, tuple[int, list[int], int]] = {
    "one row": (1, [0, 0, 1, 0], 0),
    "uneven": (64, [3, 0, 29, 1, 31], 0),
    "rows of no group": (40, [7, 0, 11], 9),
    "none used": (8, [0, 0], 3),
    "one group": (300, [300], 0),
}
"""Rows, group sizes and first row."""


def expected(rows: np.ndarray, weights: np.ndarray, sizes: list[int], first: int) -> np.ndarray:
    group_of_row = np.full(len(rows), -1)
    group_of_row[first : first + sum(sizes)] = np.repeat(np.arange(len(sizes)), sizes)
    out = np.zeros((len(rows), weights.shape[1]))
    for row, group in enumerate(group_of_row):
        if group >= 0:
            out[row] = weights[group].astype(np.float64) @ rows[row].astype(np.float64)
    return out


def arrays(num_rows: int, num_groups: int, dtype: Any, size: int = 32, outputs: int = 24) -> Any:
    rng = np.random.default_rng(0)
    rows = np.array(jnp.asarray(rng.standard_normal((num_rows, size)), dtype))
    weights = np.asarray(jnp.asarray(rng.standard_normal((num_groups, outputs, size)), dtype))
    return rows, weights


@pytest.mark.parametrize("name", ["awq, groups of 32, bfloat16", "mxfp4", "int8 of each output"])
@pytest.mark.parametrize("implementation", ["reference", None])
def test_quantized_matrices(implementation: str | None, name: str) -> None:
    num_rows, sizes, first = SIZES["uneven"]
    rows, _ = arrays(num_rows, len(sizes), "float32", size=64)
    form, shape = FORMATS[name], (len(sizes), 24, 64)
    unpacked = random_arrays(form, shape)
    weight = QuantizedWeight(form, **pack(form, unpacked))
    run = grouped_matmul
    if implementation is None:
        run = jax.jit(grouped_matmul)
    found = run(jnp.asarray(rows), weight, jnp.asarray(sizes, jnp.int32), first_row=first)
    values = np.asarray(dequantize(weight, jnp.float32))
    np.testing.assert_allclose(found, expected(rows, values, sizes, first), rtol=0, atol=1e-4)


@pytest.mark.jax_floor
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("case", SIZES)
@pytest.mark.parametrize("implementation", ["reference", "xla", None])
def test_matches_float64(implementation: str | None, case: str, dtype: str) -> None:
    num_rows, sizes, first = SIZES[case]
    rows, weights = arrays(num_rows, len(sizes), dtype)
    outside = np.ones(num_rows, bool)
    outside[first : first + sum(sizes)] = False
    rows[outside] = np.nan
    run = grouped_matmul
    if implementation != "reference":
        run = jax.jit(grouped_matmul, static_argnames=("dtype", "implementation"))
    found = run(
        jnp.asarray(rows),
        jnp.asarray(weights),
        jnp.asarray(sizes, jnp.int32),
        first_row=jnp.int32(first),
        implementation=implementation,
    )
    assert found.dtype == jnp.float32
    np.testing.assert_allclose(found, expected(rows, weights, sizes, first), rtol=0, atol=1e-4)


def test_a_row_does_not_depend_on_the_others() -> None:
    rows, weights = arrays(64, 4, "bfloat16")
    run = jax.jit(grouped_matmul)

    def result(sizes: list[int], row: int, of: int) -> np.ndarray:
        mixed = np.roll(rows, row - of, axis=0)
        return np.asarray(run(mixed, weights, jnp.asarray(sizes, jnp.int32)))[row]

    assert np.array_equal(result([20, 20, 20, 4], 25, 25), result([0, 64, 0, 0], 63, 25))


def test_temporaries_are_those_of_one_group() -> None:
    num_rows, num_groups, size, outputs = 64, 32, 256, 512
    rows, weights = arrays(num_rows, num_groups, "bfloat16", size, outputs)
    compiled = (
        jax.jit(grouped_matmul).lower(rows, weights, jnp.ones(num_groups, jnp.int32)).compile()
    )
    one_group = size * outputs * 2
    activations = (num_rows + 256) * (size + 2 * outputs) * 4
    assert compiled.memory_analysis().temp_size_in_bytes < 2 * one_group + activations


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rows_mk": jnp.zeros((4, 5))}, r"weights_gnk must have shape \[G, N, 5\]"),
        ({"rows_mk": jnp.zeros((4, 8), jnp.int32)}, r"rows_mk must be \[M, K\]"),
        ({"weights_gnk": jnp.zeros((2, 3, 8), jnp.bfloat16)}, "must have rows_mk's dtype float32"),
        ({"group_sizes": jnp.zeros(3, jnp.int32)}, r"group_sizes must be int32 \[2\]"),
        ({"group_sizes": jnp.zeros(2)}, "got float32"),
        ({"first_row": jnp.zeros(1, jnp.int32)}, "first_row must be an integer scalar"),
        ({"implementation": "triton"}, "implementation must be one of"),
    ],
)
def test_bad_arguments(changes: dict[str, Any], message: str) -> None:
    arguments = {
        "rows_mk": jnp.zeros((4, 8)),
        "weights_gnk": jnp.zeros((2, 3, 8)),
        "group_sizes": jnp.zeros(2, jnp.int32),
    } | changes
    with pytest.raises(ValueError, match=message):
        grouped_matmul(**arguments)


def job(function: str, env: dict | None = None, **arguments: Any) -> Any:
    return run_job(f"{jobs.__name__}:{function}", arguments, timeout=400, env=env)


INTERPRETED = [
    {"rows": 70, "sizes": [3, 0, 66, 1], "size": 320, "outputs": 128, "config": (64, 1, 3)},
    {
        "rows": 200, "sizes": [20, 0, 150], "first_row": 9, "size": 256, "outputs": 256,
        "out_dtype": "bfloat16", "config": (128, 2, 3),
    },
    {"rows": 5, "sizes": [0, 5, 0], "size": 64, "outputs": 192, "config": (64, 1, 4), "dtype": "float16"},
]  # fmt: skip
"""Tiles of one and two consumers, whole and not, blocks of columns, rows of no group, rings that go round."""


@pytest.mark.jax_floor
def test_the_kernel_interpreted_matches_float64_and_has_no_races() -> None:
    errors = job("interpret", QUICK_TO_COMPILE, cases=INTERPRETED)
    limits = [1e-6, 2e-2, 1e-6]
    assert all(e <= limit for e, limit in zip(errors, limits, strict=True)), errors


def test_planted_faults_are_caught() -> None:
    outcomes = job("faults", QUICK_TO_COMPILE, case=INTERPRETED[1] | {"out_dtype": "float32"})
    assert outcomes.keys() == jobs.FAULTS.keys()
    assert all(outcome != "right" for outcome in outcomes.values()), outcomes


@needs_compiler
def test_compiled_for_the_h200_it_reads_each_matrix_once_without_spills() -> None:
    cases = [
        {"rows": 512, "groups": 64, "outputs": 1536, "size": 2048},
        {"rows": 2048, "groups": 8, "outputs": 2880, "size": 2880},
        {"rows": 64, "groups": 8, "outputs": 100, "size": 2048},
    ]
    *kernels, fallback = job("compile_for_gpu", cases=cases)
    for case, result in zip(cases, kernels, strict=False):
        assert len(result["registers"]) == 1
        assert result["spilled"] == 0
        weights = case["groups"] * case["outputs"] * case["size"] * 2
        activations = case["rows"] * (case["size"] + case["outputs"]) * 2
        assert weights < result["num_bytes"] < weights + 6 * activations, (case, result)
        assert result["temporaries"] < 4 * activations, (case, result)
    assert fallback["registers"] == []
    assert fallback["temporaries"] < 2 * 100 * 2048 * 2 + 200 * 2048 * 2


def test_a_cpu_never_imports_the_kernel() -> None:
    assert job("modules_imported_on_cpu") == []
