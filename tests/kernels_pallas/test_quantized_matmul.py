"""Quantized matmul: every format and backend against float64, parts of weights, exact sums of int8, bad arguments."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas import WeightFormat, quantized_matmul
from kernels_pallas.compile_job import run_job
from kernels_pallas.quantized_matmul.weight import as_matrix, dequantize, take_rows
from tests.kernels_pallas import quantized_matmul_jobs as jobs
from tests.kernels_pallas.mosaic_runs import QUICK_TO_COMPILE
from tests.kernels_pallas.quantized_weights import (
    FORMATS,
    quantized_rows,
    random_arrays,
    stands_for,
    weight_of,
)

SOME_FORMATS = (
    "awq, groups of 128",
    "blocks of 64, 5 bits",
    "e4m3 of each output",
    "int8, given scale",
    "e4m3 in blocks, activations too",
)
run = jax.jit(quantized_matmul, static_argnames=("num_in_axes", "dtype", "implementation"))


def rows(num_rows: int, size: int, dtype: Any = "float32") -> jax.Array:
    return jnp.asarray(np.random.default_rng(1).standard_normal((num_rows, size)), dtype)


@pytest.mark.jax_floor
@pytest.mark.parametrize("name", FORMATS)
def test_dequantized(name: str) -> None:
    format, shape = FORMATS[name], (3, 4, 256)
    arrays = random_arrays(format, shape)
    weight = weight_of(format, arrays)
    assert (weight.shape, weight.ndim, weight.dtype) == (shape, 3, jnp.bfloat16)
    assert weight.nbytes == format.nbytes(shape)
    want = stands_for(format, arrays)
    found = dequantize(weight, jnp.float32)
    np.testing.assert_allclose(found, want, rtol=2e-6, atol=2e-6)
    rounded = jnp.asarray(np.asarray(found), jnp.bfloat16)
    assert np.array_equal(dequantize(weight), rounded)


@pytest.mark.jax_floor
@pytest.mark.parametrize(
    ("implementation", "name", "num_rows"),
    [("xla", name, 5) for name in FORMATS]
    + [("xla", name, 1) for name in SOME_FORMATS]
    + [("reference", name, 2) for name in SOME_FORMATS]
    + [(None, "q4_1", 4)],
)
def test_matches_float64(implementation: str | None, name: str, num_rows: int) -> None:
    format, size = FORMATS[name], 512
    arrays = random_arrays(format, (24, size))
    x = rows(num_rows, size)
    call = quantized_matmul if implementation == "reference" else run
    found = call(x, weight_of(format, arrays), implementation=implementation)
    weight = stands_for(format, arrays)
    if format.activation is None:
        want, off = np.asarray(x, np.float64) @ weight.T, 0.0
    else:
        values, maybe = quantized_rows(x, format, 0.02 if format.static_input else None)
        want, off = values @ weight.T, maybe @ np.abs(weight).T
    assert found.dtype == jnp.float32
    error = np.abs(np.asarray(found) - want)
    assert np.all(error <= 1e-4 + off), np.max(error - off)
    assert np.median(error) < 1e-4


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", ["awq, groups of 128", "q5_1", "nf4", "e4m3 of each output"])
def test_operands_of_16_bits(name: str, dtype: str) -> None:
    """The weight is rounded to them once, from float32."""
    arrays = random_arrays(FORMATS[name], (64, 256))
    x = rows(8, 256, dtype)
    found = run(x, weight_of(FORMATS[name], arrays), dtype=jnp.dtype(dtype))
    assert found.dtype == jnp.dtype(dtype)
    weight = np.asarray(
        jnp.asarray(stands_for(FORMATS[name], arrays).astype(np.float32), dtype), np.float64
    )
    want = np.asarray(x).astype(np.float64) @ weight.T
    bits = {"bfloat16": 8, "float16": 11}[dtype]
    np.testing.assert_allclose(np.asarray(found, np.float64), want, rtol=2.0**-bits, atol=2e-3)


def test_more_rows_than_a_block_holds() -> None:
    """K so large that a block is 16 rows, and N no multiple of it."""
    format = FORMATS["q4_k"]
    arrays = random_arrays(format, (43, 8192))
    x = rows(3, 8192)
    found = run(x, weight_of(format, arrays))
    want = np.asarray(x, np.float64) @ stands_for(format, arrays).T
    np.testing.assert_allclose(found, want, rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("name", ["awq, groups of 32, bfloat16", "int8 of each output"])
def test_several_contracted_axes(name: str) -> None:
    format, shape = FORMATS[name], (10, 3, 2, 64)
    arrays = random_arrays(format, shape, num_in_axes=3)
    x = rows(4, 3 * 2 * 64)
    found = run(x, weight_of(format, arrays), num_in_axes=3)
    want = np.asarray(x, np.float64) @ stands_for(format, arrays).reshape(10, -1).T
    np.testing.assert_allclose(found, want, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    "name", ["awq, groups of 128", "int8 of each output", "blocks of 64, 6 bits"]
)
def test_parts_of_a_weight_are_weights(name: str) -> None:
    format = FORMATS[name]
    arrays = random_arrays(format, (6, 512))
    weight, want = weight_of(format, arrays), stands_for(format, arrays)
    ids = jnp.asarray([[4, 0], [5, 4]])
    np.testing.assert_allclose(
        dequantize(take_rows(weight, ids), jnp.float32), want[np.asarray(ids)], rtol=2e-6, atol=2e-6
    )
    if format.group_size is None:
        return
    right = weight.map_arrays(lambda x: x[:, x.shape[1] // 2 :])
    np.testing.assert_allclose(dequantize(right, jnp.float32), want[:, 256:], rtol=2e-6, atol=2e-6)


def test_sums_of_int8_are_exact() -> None:
    """The largest there are, over far more products than float32 adds up exactly, and one that is odd."""
    size = 40_000
    x = np.full((2, size), 127.0, np.float32)
    x[0, 0], x[1, ::2] = 126, -127
    codes = np.full((3, size), -128, np.int8)
    codes[1], codes[2, 7] = 127, 1
    format = WeightFormat("int8", None, scales="float32", activation="int8", static_input=True)
    ones = {"scales": np.ones(3, np.float32), "input_scale": np.ones((), np.float32)}
    weight = weight_of(format, {"codes": codes, **ones})
    want = (x.astype(np.int64) @ codes.astype(np.int64).T).astype(np.float32)
    for num_rows in (1, 2):
        for implementation in ("xla", "reference"):
            call = run if implementation == "xla" else quantized_matmul
            found = call(jnp.asarray(x[:num_rows]), weight, implementation=implementation)
            assert np.array_equal(found, want[:num_rows])


def test_rows_of_zeros_among_quantized_activations() -> None:
    for name in ("int8, activations too", "e4m3 in blocks, activations too"):
        weight = weight_of(FORMATS[name], random_arrays(FORMATS[name], (8, 256)))
        assert np.array_equal(run(jnp.zeros((3, 256)), weight), np.zeros((3, 8)))


def test_no_rows() -> None:
    format = FORMATS["q4_0"]
    weight = weight_of(format, random_arrays(format, (8, 64)))
    assert quantized_matmul(jnp.zeros((0, 64)), weight).shape == (0, 8)


def test_temporaries_are_those_of_a_block() -> None:
    format, shape = FORMATS["awq, groups of 128"], (4096, 2048)
    weight = as_matrix(weight_of(format, random_arrays(format, shape)))
    compiled = run.lower(rows(64, 2048, "bfloat16"), weight).compile()
    out = 64 * 4096 * 4
    assert compiled.memory_analysis().temp_size_in_bytes < 2 * out + (2 << 20)


def test_bits_per_weight() -> None:
    shape = (4096, 4096)

    def bits(name: str) -> float:
        return FORMATS[name].nbytes(shape) * 8 / (4096 * 4096)

    assert bits("awq, groups of 128") == pytest.approx(4.1875)
    assert bits("q4_1") == 5
    assert bits("q4_k") == 4.625
    assert bits("mxfp4") == 4.25
    assert bits("q8_0") == 8.5


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"codes": "int3"}, r"WeightFormat.codes must be one of \('uint2', .*got 'int3'"),
        ({"group_size": 0}, "group_size must be positive"),
        (
            {"group_size": 7},
            "group_size must be a multiple of pack_block or divide it, 2 for 'uint4', got 7",
        ),
        ({"group_size": 24, "pack_block": 64}, "or divide it, 64 for 'uint4', got 24"),
        ({"codes": "uint5", "pack_block": 4}, "pack_block must be a power of two of at least 8"),
        ({"pack_block": 48}, "pack_block must be a power of two"),
        ({"dtype": "int32"}, r"WeightFormat.dtype must be one of \('float16'"),
        ({"scales": "float64"}, "WeightFormat.scales must be one of"),
        ({"scales": "uint8"}, "super_group_size must be given with scales of uint8 or int8"),
        (
            {"scales": "uint8", "super_group_size": 48},
            "must be a multiple of group_size 32, got 48",
        ),
        ({"minima": "int8"}, "WeightFormat.minima must be one of"),
        ({"minima": "uint8"}, "minima of uint8 go with scales of uint8"),
        ({"zeros": True, "zero": 8}, "zero must be 0 with zeros=True, got 8"),
        ({"codes": "nf4", "zero": 8}, "go with integer codes, not with 'nf4'"),
        ({"group_size": None, "zeros": True}, "need a group_size"),
        ({"activation": "int4"}, r"activation must be one of \(None, 'int8', 'e4m3'\), got 'int4'"),
        ({"activation": "int8"}, "goes with codes 'int8'"),
        ({"static_input": True}, "static_input needs an activation"),
    ],
)
def test_bad_formats(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        WeightFormat(**{"codes": "uint4", "group_size": 32} | fields)


def test_shapes_that_a_format_does_not_divide() -> None:
    with pytest.raises(ValueError, match=r"\(4, 100\) has a last axis of 100.*group_size 32"):
        WeightFormat("uint4", 32).arrays((4, 100))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": jnp.zeros((2, 32))}, r"x_mk must be \[M, 64\]"),
        ({"x": jnp.zeros(64)}, r"x_mk must be \[M, K\]"),
        ({"x": jnp.zeros((2, 64), jnp.int8)}, "got int8"),
        ({"weight": jnp.zeros((8, 64))}, "weight must be a QuantizedWeight"),
        ({"scales": jnp.zeros((8, 4), jnp.float16)}, r"weight.scales must be float16 \(8, 2\)"),
        ({"scales": jnp.zeros((8, 2))}, r"got float32 \(8, 2\)"),
        ({"zeros": None}, r"weight.zeros must be uint8 \(8, 2\).*got None"),
        ({"minima": jnp.zeros((8, 2))}, "weight.minima must be None"),
        ({"num_in_axes": 3}, "num_in_axes must be between 1 and 2"),
        ({"dtype": jnp.int32}, "dtype must be one of"),
        ({"implementation": "triton"}, "implementation must be one of"),
    ],
)
def test_bad_arguments(change: dict[str, Any], message: str) -> None:
    format = WeightFormat("uint4", 32, zeros=True)
    weight = weight_of(format, random_arrays(format, (8, 64)))
    options = {k: v for k, v in change.items() if k in ("num_in_axes", "dtype", "implementation")}
    arrays = {k: v for k, v in change.items() if k in ("scales", "zeros", "minima")}
    x = change.get("x", jnp.zeros((2, 64)))
    with pytest.raises(ValueError, match=message):
        quantized_matmul(x, change.get("weight", replace(weight, **arrays)), **options)


def job(function: str, env: dict | None = None, **arguments: Any) -> Any:
    return run_job(f"{jobs.__name__}:{function}", arguments, timeout=400, env=env)


def case(
    format: dict[str, Any], weight: tuple[int, int], rows: int, config: tuple, **rest: Any
) -> dict[str, Any]:
    return {"format": format, "weight": weight, "rows": rows, "config": config, **rest}


AWQ = {"codes": "uint4", "group_size": 128, "zeros": True, "pack_block": 64}
SYMMETRIC = {"codes": "uint4", "group_size": 32, "zero": 8, "pack_block": 64}
MINIMA = {"codes": "uint4", "group_size": 64, "minima": "float16", "pack_block": 64}
OF_ROWS = {"group_size": None, "scales": "float32"}
BLOCKS = {"codes": "e4m3", "group_size": 128, "scales": "float32", "activation": "e4m3"}
INTERPRETED = {
    "several items, parts, units that share groups": case(AWQ, (192, 1280), 5, (8, 1, 3, 2)),
    "two consumers": case(SYMMETRIC, (128, 384), 20, (16, 2, 2, 1), out_dtype="bfloat16", cores=1),
    "minima": case(MINIMA, (64, 512), 3, (8, 1, 2, 1), dtype="float16"),
    "int8": case({"codes": "int8", **OF_ROWS}, (64, 384), 3, (8, 1, 2, 1), cores=1),
    "e4m3 in blocks on both sides": case(BLOCKS, (64, 1024), 3, (8, 1, 2, 1), cores=1),
    "int8 on both sides": case(
        {"codes": "int8", "activation": "int8", **OF_ROWS}, (64, 384), 3, (8, 1, 2, 1), cores=1
    ),
}
"""Columns, consumers, stages and parts; rings that go round three times."""


@pytest.mark.jax_floor
def test_the_kernel_interpreted_matches_float64_and_has_no_races() -> None:
    errors = job("interpret", QUICK_TO_COMPILE, cases=list(INTERPRETED.values()))
    for name, error in zip(INTERPRETED, errors, strict=True):
        assert error < (1e-2 if name == "two consumers" else 2e-6), (name, errors)


FAULTS = {
    "codes of another step": ("pl.ds(step * step_bytes, step_bytes)", "pl.ds(0 * step, step_bytes)"),
    "another consumer's rows": ("+ consumer * ROWS, ROWS)", "+ 0 * consumer, ROWS)"),
    "a slot refilled too early": ("pl.when(filled + i >= stages)", "pl.when(filled + i >= 2 * stages)"),
    "no wait for what is loaded": ("plgpu.barrier_wait(refs.loaded.at[slot])", "pass"),
    "the next groups' scales": ("self.keep(place, ahead)", "self.keep(1 - place, ahead)"),
    "scales without their factor": ("scales * self.scale)", "scales)"),
    "another group's sums of x": ("refs.sums_s.at[slot, group]", "refs.sums_s.at[slot, 0]"),
    "a part left out": ("out.sum(axis=0)", "out[0]"),
}  # fmt: skip
"""What is replaced in the kernel's source, and by what."""


def test_planted_faults_are_caught() -> None:
    faulty = case({**SYMMETRIC, "zero": 3}, (128, 512), 5, (8, 2, 2, 2), cores=1)
    outcomes = job("faults", QUICK_TO_COMPILE, case=faulty, edits=FAULTS)
    assert outcomes.keys() == FAULTS.keys()
    assert all(outcome != "right" for outcome in outcomes.values()), outcomes


def test_a_cpu_never_imports_the_kernel() -> None:
    assert job("modules_imported_on_cpu") == []
