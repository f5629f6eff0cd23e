"""Jobs for `compile_job`: the kernel interpreted on the CPU, with faults planted, and compiled for the H200."""

from __future__ import annotations

import os
import sys
import tempfile
import types
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kernels_pallas import grouped_matmul

FAULTS = {
    "another group's matrix": ("refs.weights.at[item.group,", "refs.weights.at[0,"),
    "rows of the tile before": ("jnp.stack(columns, axis=1)", "jnp.stack((group, aligned_starts, *columns[2:]), axis=1)"),
    "a row off": ("starts[row_group] + row,", "starts[row_group] + row + 1,"),
    "first consumer's rows for both": ("+ consumer * ROWS\n                plgpu", "\n                plgpu"),
    "columns of the first block": ("pl.ds(item.column, config.columns), columns]", "pl.ds(0, config.columns), columns]"),
    "rows of another step": ("refs.rows_s.at[slot, consumer], refs.weights_s", "refs.rows_s.at[0, consumer], refs.weights_s"),
    "the next group's rows written": ("jnp.clip(item.rows_left - before, 0, ROWS)", "jnp.int32(ROWS) + 0 * item.rows_left"),
    "rows past a power of two left": ("start = count & ~jnp.int32(2 * size - 1)", "start = count & ~jnp.int32(4 * size - 1)"),
}  # fmt: skip
"""What is replaced in the kernel's source, and by what."""


def inputs(case: dict[str, Any], seed: int = 0) -> tuple[np.ndarray, ...]:
    """Rows, matrices, group sizes and first row. Rows of no group are NaN."""
    rng = np.random.default_rng(seed)
    num_rows, sizes, first = case["rows"], case["sizes"], case.get("first_row", 0)
    dtype = jnp.dtype(case.get("dtype", "bfloat16"))
    rows = rng.normal(size=(num_rows, case["size"])).astype(dtype)
    weights = rng.normal(size=(len(sizes), case["outputs"], case["size"])).astype(dtype)
    rows[:first] = rows[first + sum(sizes) :] = np.nan
    return rows, weights, np.asarray(sizes, np.int32), np.int32(first)


def error(got: Any, args: tuple[np.ndarray, ...]) -> float:
    """Of the worst element, relative to the square root of the number of products; infinite for NaN."""
    rows, weights, sizes, first = args
    want = np.zeros((len(rows), weights.shape[1]))
    ends = first + np.cumsum(sizes)
    for group, (start, end) in enumerate(zip(ends - sizes, ends, strict=True)):
        want[start:end] = rows[start:end].astype(np.float64) @ weights[group].astype(np.float64).T
    found = np.abs(np.asarray(got).astype(np.float64) - want) / rows.shape[1] ** 0.5
    return float(np.max(np.where(np.isnan(found), np.inf, found)))


def interpret(cases: list[dict[str, Any]]) -> list[float]:
    """Errors of the interpreted kernel. Raises on a race."""
    from kernels_pallas.grouped_matmul import mosaic_gpu
    from tests.kernels_pallas.mosaic_jobs import races_found

    errors = []
    for seed, case in enumerate(cases):
        errors.append(_error(mosaic_gpu, case, seed))
        assert not races_found()
    return errors


def faults(case: dict[str, Any]) -> dict[str, str]:
    """`planted_faults.outcomes`."""
    from kernels_pallas.grouped_matmul import mosaic_gpu
    from tests.kernels_pallas.planted_faults import outcomes

    return outcomes(mosaic_gpu, FAULTS, partial(_error, case=case))


def _error(module: types.ModuleType, case: dict[str, Any], seed: int = 0) -> float:
    from kernels_pallas.grouped_matmul.mosaic_gpu_config import Config
    from tests.kernels_pallas.planted_faults import interpreted

    args = inputs(case, seed)
    out_dtype = jnp.dtype(case.get("out_dtype", "float32"))
    columns, consumers, stages = case["config"]
    config = Config(columns, consumers, stages, out_dtype.itemsize, cores=2)
    got = interpreted(module.grouped_matmul, args, {"dtype": out_dtype, "config": config})
    return error(got, args)


def modules_imported_on_cpu() -> list[str]:
    """Parts of Pallas that a jitted call on the CPU has imported."""
    args = jnp.ones((2, 64)), jnp.ones((2, 64, 64)), jnp.ones(2, jnp.int32)
    jax.block_until_ready(jax.jit(grouped_matmul)(*args))
    return [name for name in sys.modules if name.startswith("jax.experimental.pallas")]


def compile_for_gpu(cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each case through the operation's own choice of a backend, with what it uses of the GPU."""
    from kernels_pallas.gpu_target import compile_for, device_mesh
    from kernels_pallas.hlo_report import analyze
    from kernels_pallas.ptx_report import MOSAIC_DUMP, reports

    results = []
    for case in cases:
        rows, groups, outputs, size = (case[k] for k in ("rows", "groups", "outputs", "size"))
        dtype = jnp.dtype(case.get("dtype", "bfloat16"))
        shapes = (
            jax.ShapeDtypeStruct((rows, size), dtype),
            jax.ShapeDtypeStruct((groups, outputs, size), dtype),
            jax.ShapeDtypeStruct((groups,), jnp.int32),
        )
        with tempfile.TemporaryDirectory() as dump:
            os.environ.update(MOSAIC_DUMP, MOSAIC_GPU_DUMP_TO=dump)
            compiled = compile_for(
                device_mesh("h200"), partial(grouped_matmul, dtype=dtype), shapes
            )
            ptx = reports(Path(dump))
        results.append(
            {
                "registers": [p.registers for p in ptx],
                "spilled": sum(p.spilled_bytes for p in ptx),
                "temporaries": compiled.memory.temporaries,
                "num_bytes": analyze(compiled.hlo).num_bytes,
            }
        )
    return results
