"""Residual addition and RMS norm in one operation: every backend against float64, the Mosaic kernel without a GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from kernels_pallas import add_rms_norm
from kernels_pallas.compile_job import run_job
from kernels_pallas.gpu_target import device_mesh, get_target
from tests.gpu_compiler import needs_compiler
from tests.kernels_pallas import add_rms_norm_jobs as jobs
from tests.kernels_pallas.mosaic_runs import QUICK_TO_COMPILE


def job(function: str, env: dict | None = None, **arguments: Any) -> Any:
    return run_job(f"{jobs.__name__}:{function}", arguments, timeout=400, env=env)


def shape(embed: int, tokens: int = 3, **more: Any) -> dict[str, Any]:
    return {"tokens": tokens, "embed": embed} | more


SUMS = {"partial_sums": 4, "update_dtype": "float32"}
GEMMA = {"update_norm": 1, "weight_offset": 1.0}

SHAPES = [
    shape(4096, **SUMS),
    shape(4096, tokens=1),
    shape(2048, partial_sums=8, update_dtype="float32"),
    shape(8192),
    shape(16_384),
    shape(1152, **GEMMA),
    shape(2560, **GEMMA),
    shape(5376, **GEMMA, **SUMS),
    shape(640, update_dtype="float32", **GEMMA),
    shape(1024, dtype="float16"),
    shape(4096, dtype="float32", update_dtype="float32", partial_sums=8, update_norm=1),
    shape(128, tokens=9, partial_sums=1),
]
"""Llama 8B on one GPU and its mixed step, 1B, a part of 70B, 405B, Gemma 3; other dtypes, the longest row with all that
needs registers; the smallest row."""


def tolerance(case: dict[str, Any]) -> float:
    """A few roundings to the result's dtype, and float32's own error."""
    return {"bfloat16": 1e-2, "float16": 2e-3, "float32": 0}[case.get("dtype", "bfloat16")] + 1e-5


@pytest.mark.jax_floor
@pytest.mark.parametrize("case", SHAPES, ids=str)
@pytest.mark.parametrize("implementation", ["xla", "reference", None])
def test_matches_float64(implementation, case):
    args, options = jobs.inputs(case)
    *args_first, update_weight = jax.tree.map(jnp.asarray, args)
    run = (
        add_rms_norm
        if implementation == "reference"
        else jax.jit(add_rms_norm, static_argnames=("eps", "weight_offset", "implementation"))
    )
    results = run(
        *args_first, update_weight=update_weight, implementation=implementation, **options
    )
    # XLA rounds the update to the result's dtype before it adds it.
    assert jobs.check(results, args, options) <= tolerance(case) * (
        1 + (implementation != "reference")
    )


@pytest.mark.jax_floor
def test_the_kernel_interpreted_matches_float64_and_has_no_races():
    errors = job("interpret", QUICK_TO_COMPILE, cases=SHAPES)
    assert all(e <= tolerance(c) for e, c in zip(errors, SHAPES, strict=True)), errors


def test_planted_faults_are_caught():
    outcomes = job(
        "faults",
        QUICK_TO_COMPILE,
        case=shape(1152, **GEMMA, partial_sums=2, update_dtype="float32"),
    )
    assert outcomes.keys() == jobs.FAULTS.keys()
    assert all(outcome in ("wrong", "race") for outcome in outcomes.values()), outcomes
    assert outcomes["another block's row written"] == "race"


@needs_compiler
def test_compiled_for_the_h200_it_is_one_kernel_of_wide_loads_without_spills():
    for case, result in zip(
        SHAPES, job("compile_for_gpu", cases=SHAPES, target="h200"), strict=True
    ):
        assert result["kernels"] == ["mosaic_gpu_v2"], case
        assert (result["temporaries"], result["spilled"]) == (0, 0), case
        rows = case["tokens"] * case["embed"]
        item = jnp.dtype(case.get("dtype", "bfloat16")).itemsize
        update = (
            case.get("partial_sums", 1) * jnp.dtype(case.get("update_dtype", "bfloat16")).itemsize
        )
        weights = (1 + case.get("update_norm", 0)) * case["embed"] * item
        if "update_dtype" in case or "dtype" not in case:
            assert result["num_bytes"] == rows * (3 * item + update) + weights, case
        if case["embed"] % (128 * 16 // item) == 0:
            assert {"ld.global.v4.b32", "st.v4.b32"} & set(result["global_accesses"]), case
            assert all(op.endswith(".v4.b32") for op in result["global_accesses"]), (case, result)


TOO_LONG = [shape(576), shape(20_480), shape(16_384, **SUMS), shape(8320, dtype="float32")]


@needs_compiler
def test_rows_that_the_kernel_cannot_do_fall_back_to_xla():
    for result in job("compile_for_gpu", cases=TOO_LONG, target="h200"):
        assert "mosaic_gpu_v2" not in result["kernels"]


@needs_compiler
@pytest.mark.parametrize(
    ("device_name", "kernel"), [("NVIDIA H100 80GB HBM3", True), ("NVIDIA A100-SXM4-80GB", False)]
)
def test_only_a_hopper_gpu_gets_the_kernel(device_name, kernel):
    target = replace(get_target("h100"), name="test", device_name=device_name)
    mesh = device_mesh(target)
    x = jax.ShapeDtypeStruct((4, 256), jnp.bfloat16, sharding=NamedSharding(mesh, PartitionSpec()))
    weight = jax.ShapeDtypeStruct((256,), jnp.bfloat16, sharding=x.sharding)
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        text = jax.jit(add_rms_norm).lower(x, x, weight).as_text()
    assert ("mosaic_gpu" in text) == kernel


def test_a_cpu_never_imports_pallas():
    assert job("modules_imported_on_cpu") == []


@pytest.mark.parametrize(
    ("message", "changes"),
    [
        (r"x_te must be floating \[T, E\], got float32 \(128,\)", {"x_te": jnp.zeros(128)}),
        (r"x_te must be floating \[T, E\], got int32", {"x_te": jnp.zeros((2, 128), jnp.int32)}),
        (r"update must be .* \(2, 128\), got float32 \(2, 64\)", {"update": jnp.zeros((2, 64))}),
        (r"update must be .* got float32 \(0, 2, 128\)", {"update": jnp.zeros((0, 2, 128))}),
        (r"update must be .* got int32", {"update": jnp.zeros((2, 128), jnp.int32)}),
        (r"weight must have shape \[128\], got \(64,\)", {"weight": jnp.zeros(64)}),
        (r"update_weight must have shape \[128\]", {"update_weight": jnp.zeros((1, 128))}),
        ("eps must be finite and not negative, got -1", {"eps": -1}),
        (r"implementation must be one of \['mosaic_gpu', 'reference', 'xla'\] or None, got 'cuda'",
         {"implementation": "cuda"}),
        ("rows must be a multiple of 128 elements up to 8192, got 64",
         {"x_te": jnp.zeros((2, 64)), "update": jnp.zeros((2, 64)), "weight": jnp.zeros(64),
          "implementation": "mosaic_gpu"}),
    ],
)  # fmt: skip
def test_refuses(message, changes):
    arguments = {"x_te": jnp.zeros((2, 128)), "update": jnp.zeros((2, 128))}
    arguments |= {"weight": jnp.zeros(128)} | changes
    with pytest.raises(ValueError, match=message):
        add_rms_norm(**arguments)
