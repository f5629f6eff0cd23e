"""Jobs for `compile_job`: the fused kernel interpreted on the CPU, with faults planted, and compiled for the H200."""

from __future__ import annotations

import os
import re
import sys
import tempfile
import types
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kernels_pallas import add_rms_norm

EPS = 1e-5

FAULTS = {
    "a row of another token": ("row = lax.axis_index(\"row\")", "row = jnp.minimum(lax.axis_index(\"row\"), 1)"),
    "partial sum left out": ("for i in range(num_partials)]", "for i in range(max(1, num_partials - 1))]"),
    "first partial sum twice": ("partial_ref.at[i, row]", "partial_ref.at[0, row]"),
    "norm of the update only": (
        "normed([x.astype(jnp.float32) for x in x_parts], weight_parts)",
        "normed(update_parts, weight_parts)",
    ),
    "mean over too many": ("squares * (1 / embed_dim)", "squares * (1 / (embed_dim + 64))"),
    "squares of the first part only": (
        "squares = sum(jnp.sum(part * part) for part in parts)",
        "squares = jnp.sum(parts[0] * parts[0])",
    ),
    "no epsilon": ("squares * (1 / embed_dim) + eps", "squares * (1 / embed_dim)"),
    "offset left out": ("(w + weight_offset)", "w"),
    "weights swapped": (
        "weight_parts, *update_weight_parts = [load(ref) for ref in weight_refs]",
        "*update_weight_parts, weight_parts = [load(ref) for ref in weight_refs]",
    ),
    "norm written where the sum belongs": (
        "*weight_refs, x_out_ref, normed_ref = refs", "*weight_refs, normed_ref, x_out_ref = refs",
    ),
    "a part not written": (
        "zip(config.parts, parts, strict=True)", "zip(config.parts[:1], parts[:1], strict=True)",
    ),
    "another block's row written": ("x_out_ref.at[row]", "x_out_ref.at[0]"),
}  # fmt: skip
"""What is replaced in the kernel's source, and by what."""


def inputs(case: dict[str, Any], seed: int = 0) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Random arguments of the operation as numpy arrays, and its options. A row of zeros shows what epsilon is for."""
    rng = np.random.default_rng(seed)
    T, E, S = case["tokens"], case["embed"], case.get("partial_sums", 0)
    dtype = jnp.dtype(case.get("dtype", "bfloat16"))
    x = rng.normal(size=(T, E)).astype(dtype)
    update = rng.normal(size=(S, T, E) if S else (T, E)).astype(case.get("update_dtype", dtype))
    x[-1], update[..., -1, :] = 0, 0
    weight = rng.normal(size=E).astype(dtype)
    update_weight = rng.normal(size=E).astype(dtype) if case.get("update_norm") else None
    options = {"eps": EPS, "weight_offset": case.get("weight_offset", 0.0)}
    return (x, update, weight, update_weight), options


def expected(
    args: tuple[Any, ...], eps: float, weight_offset: float
) -> tuple[np.ndarray, np.ndarray]:
    """In float64, nothing rounded."""
    x, update, *weights = (None if a is None else a.astype(np.float64) for a in args)
    weight, update_weight = weights

    def norm(rows: np.ndarray, norm_weight: np.ndarray) -> np.ndarray:
        length = np.linalg.norm(rows, axis=1, keepdims=True)
        return (
            rows / np.hypot(length / rows.shape[1] ** 0.5, eps**0.5) * (norm_weight + weight_offset)
        )

    added = update.reshape(-1, *x.shape).sum(axis=0)
    if update_weight is not None:
        added = norm(added, update_weight)
    return x + added, norm(x + added, weight)


def check(results: Any, args: tuple[Any, ...], options: dict[str, Any]) -> float:
    """Relative error of the worst element; infinite for NaN."""
    worst = 0.0
    for got, want in zip(results, expected(args, **options), strict=True):
        assert (got.shape, got.dtype) == (args[0].shape, args[0].dtype)
        error = np.abs(np.asarray(got).astype(np.float64) - want) / np.maximum(1, np.abs(want))
        worst = max(worst, float(np.max(np.where(np.isnan(error), np.inf, error))))
    return worst


def interpret(cases: list[dict[str, Any]]) -> list[float]:
    """Errors of the interpreted kernel. Raises on a race."""
    from kernels_pallas.add_rms_norm import mosaic_gpu
    from tests.kernels_pallas.mosaic_jobs import races_found

    errors = []
    for seed, case in enumerate(cases):
        errors.append(_error(mosaic_gpu, case, seed))
        assert not races_found()
    return errors


def faults(case: dict[str, Any]) -> dict[str, str]:
    """`planted_faults.outcomes`."""
    from kernels_pallas.add_rms_norm import mosaic_gpu
    from tests.kernels_pallas.planted_faults import outcomes

    return outcomes(mosaic_gpu, FAULTS, partial(_error, case=case))


def _error(module: types.ModuleType, case: dict[str, Any], seed: int = 0) -> float:
    from tests.kernels_pallas.planted_faults import interpreted

    args, options = inputs(case, seed)
    return check(interpreted(module.add_rms_norm, args, options), args, options)


def modules_imported_on_cpu() -> list[str]:
    """Parts of Pallas that a jitted call on the CPU has imported."""
    x = jnp.ones((2, 128))
    jax.block_until_ready(jax.jit(add_rms_norm)(x, x, x[0]))
    return [name for name in sys.modules if name.startswith("jax.experimental.pallas")]


def compile_for_gpu(cases: list[dict[str, Any]], target: str) -> list[dict[str, Any]]:
    """Each case through the operation's own choice of a backend, with what it uses of the GPU."""
    from kernels_pallas.gpu_target import compile_for, device_mesh
    from kernels_pallas.hlo_report import analyze
    from kernels_pallas.ptx_report import MOSAIC_DUMP, reports

    results = []
    for case in cases:
        with tempfile.TemporaryDirectory() as dump:
            os.environ.update(MOSAIC_DUMP, MOSAIC_GPU_DUMP_TO=dump)
            args, options = inputs(case)

            def step(x, update, weight, update_weight, options=options):
                return add_rms_norm(x, update, weight, update_weight=update_weight, **options)

            shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), args)
            compiled = compile_for(device_mesh(target), step, shapes)
            hlo = analyze(compiled.hlo)
            ptx = reports(Path(dump))
        results.append(
            {
                "kernels": [kernel.opcode for kernel in hlo.kernels],
                "num_bytes": hlo.num_bytes,
                "temporaries": compiled.memory.temporaries,
                "registers": [p.registers for p in ptx],
                "spilled": sum(p.spilled_bytes for p in ptx),
                "global_accesses": sorted(
                    {op for p in ptx for op in p.instructions if re.match(r"(ld|st)\.(global\.)?[vb]\d", op)}
                ),
            }
        )  # fmt: skip
    return results
