"""Jobs for `compile_job`: the kernel interpreted on the CPU, with faults planted, and compiled for the H200."""

from __future__ import annotations

import sys
import types
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kernels_pallas import WeightFormat, quantized_matmul
from tests.kernels_pallas.quantized_weights import (
    quantized_rows,
    random_arrays,
    stands_for,
    weight_of,
)


def error(got: Any, x: np.ndarray, format: WeightFormat, arrays: dict[str, np.ndarray]) -> float:
    """Of the worst element, relative to the square root of the number of products, beyond what codes of x in doubt make;
    infinite for NaN."""
    weight = stands_for(format, arrays)
    values, off = x.astype(np.float64), np.zeros(x.shape)
    if format.activation is not None:
        values, off = quantized_rows(x, format, None)
    found = np.abs(np.asarray(got).astype(np.float64) - values @ weight.T)
    found = np.maximum(found - off @ np.abs(weight).T, 0) / x.shape[1] ** 0.5
    return float(np.max(np.where(np.isnan(found), np.inf, found)))


def interpret(cases: list[dict[str, Any]]) -> list[float]:
    """Errors of the interpreted kernel. Raises on a race."""
    from kernels_pallas.quantized_matmul import mosaic_gpu
    from tests.kernels_pallas.mosaic_jobs import races_found

    errors = []
    for seed, case in enumerate(cases):
        errors.append(_error(mosaic_gpu, case, seed))
        assert not races_found()
    return errors


def faults(case: dict[str, Any], edits: dict[str, tuple[str, str]]) -> dict[str, str]:
    """`planted_faults.outcomes`."""
    from kernels_pallas.quantized_matmul import mosaic_gpu
    from tests.kernels_pallas.planted_faults import outcomes

    return outcomes(mosaic_gpu, edits, partial(_error, case=case))


def _error(module: types.ModuleType, case: dict[str, Any], seed: int = 0) -> float:
    from kernels_pallas.quantized_matmul.mosaic_gpu_config import Config, Operands
    from tests.kernels_pallas.planted_faults import interpreted

    format = WeightFormat(**case["format"])
    arrays = random_arrays(format, case["weight"], seed=seed)
    rng = np.random.default_rng(seed)
    shape = (case["rows"], case["weight"][1])
    x = np.asarray(jnp.asarray(rng.standard_normal(shape), case.get("dtype", "bfloat16")))
    out_dtype = jnp.dtype(case.get("out_dtype", "float32"))
    columns, consumers, stages, parts = case["config"]
    kinds = Operands.of(format)
    full = parts > 1 or kinds.scaled_after
    out_bytes = 4 if full else out_dtype.itemsize
    config = Config(columns, consumers, stages, parts, out_bytes, kinds, cores=case.get("cores", 2))
    got = interpreted(
        module.quantized_matmul, (x, weight_of(format, arrays)), {"dtype": out_dtype, "config": config}
    )  # fmt: skip
    return error(got, x, format, arrays)


def modules_imported_on_cpu() -> list[str]:
    """Parts of Pallas that a jitted call on the CPU has imported."""
    format = WeightFormat("uint4", 32, zeros=True, pack_block=64)
    weight = weight_of(format, random_arrays(format, (64, 256)))
    jax.block_until_ready(jax.jit(quantized_matmul)(jnp.ones((2, 256)), weight))
    return [name for name in sys.modules if name.startswith("jax.experimental.pallas")]
