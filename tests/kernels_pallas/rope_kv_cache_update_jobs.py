"""Jobs for `compile_job`: the fused kernel interpreted on the CPU, with faults planted, and compiled for the H200."""

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

from kernels_pallas import rope_kv_cache_update
from kernels_pallas.quantized_pages import LARGEST

EPS = 1e-5
NUM_PAGES = 6

FAULTS = {
    "slot off by one": (
        "page_ref[token], offset_ref[token]",
        "page_ref[token], lax.rem(offset_ref[token] + 1, jnp.int32(k_pages_ref.shape[2]))",
    ),
    "page of another token": ("page_ref[token]", "page_ref[0]"),
    "page and offset of the old layout": ("page, :, offset", "offset, :, page"),
    "rotated the other way": (
        "first * cos - second * sin, second * cos + first * sin",
        "first * cos + second * sin, second * cos - first * sin",
    ),
    "sine for cosine": ("for x in (cos, sin))", "for x in (sin, cos))"),
    "keys normed with the queries' weights": ("norm_refs or", "norm_refs[:1] * 2 or"),
    "values not waited for": ("plgpu.barrier_wait(v_barrier)", "pass"),
    "queries and keys not waited for": ("plgpu.barrier_wait(qk_barrier)", "pass"),
    "an arrival too few": ("else 1 + num_kv_heads", "else num_kv_heads"),
    "registers' stores not committed": ("plgpu.commit_smem()", "pass"),
}  # fmt: skip
"""What is replaced in the kernel's source, and by what."""

QUANTIZED_FAULTS = {
    "values scaled as keys": ("parts, scale_refs[1])", "parts, scale_refs[0])"),
    "scale of another head": ("scale_ref[kv_head], scale", "scale_ref[0], scale"),
    "values of the first round only": ("narrow[1], rows, parts", "narrow[1], pl.ds(0, rows.size), parts"),
    "converted numbers not committed": ("plgpu.commit_smem()", "pass"),
}  # fmt: skip
"""The same on the way into 8-bit pages."""


def inputs(case: dict[str, Any], seed: int = 0) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Random arguments of the operation as numpy arrays, and its options. The last token is padding in page 0."""
    rng = np.random.default_rng(seed)
    T, K, G, H = (case[name] for name in ("tokens", "kv_heads", "queries", "head_size"))
    S, dtype = case["page_size"], jnp.dtype(case.get("dtype", "bfloat16"))
    kv_dtype = case.get("kv_dtype")
    rotated = case.get("rotated", H)

    def normal(*shape: int) -> np.ndarray:
        return rng.normal(size=shape).astype(dtype)

    def page_numbers() -> np.ndarray:
        numbers = rng.normal(size=(NUM_PAGES, K, S, H))
        return (numbers * 20).astype(kv_dtype) if kv_dtype else numbers.astype(dtype)

    slots = S + rng.choice((NUM_PAGES - 1) * S, T, replace=False)
    slots[-1] = 3 % S
    angles = rng.uniform(-10, 10, size=(T, rotated // 2))
    norms = (normal(H), normal(H)) if case.get("norm") else (None, None)
    args = (
        normal(T, K, G + 2, H),
        (page_numbers(), page_numbers()),
        slots.astype(np.int32),
        np.cos(angles).astype(np.float32),
        np.sin(angles).astype(np.float32),
    )
    options = {"norm_eps": EPS, "norm_weight_offset": case.get("norm_weight_offset", 0.0)}
    scales = None
    if kv_dtype:
        # Numbers beyond 1.5 to 4 standard deviations saturate.
        scales = tuple(
            rng.uniform(1.5, 4, K).astype(np.float32) / LARGEST[kv_dtype] for _ in range(2)
        )
    return (*args, *norms, scales), options


def expected(
    args: tuple[Any, ...], norm_eps: float, norm_weight_offset: float
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """In float64, nothing rounded: queries and both caches, 8-bit ones with what their numbers should have been."""
    qkv, (k_pages, v_pages), slots, cos, sin, q_norm, k_norm, kv_scales = args
    x = qkv.astype(np.float64)
    T, _, N, H = x.shape
    half, S = cos.shape[1], k_pages.shape[2]
    weights = np.ones((N - 1, H))
    if q_norm is not None:
        weights[:-1], weights[-1] = q_norm.astype(np.float64), k_norm.astype(np.float64)
        weights += norm_weight_offset
        mean = np.mean(np.square(x[:, :, :-1]), axis=-1, keepdims=True)
        x[:, :, :-1] *= weights / np.sqrt(mean + norm_eps)
    turned = (x[..., :half] + 1j * x[..., half : 2 * half]) * (cos + 1j * sin)[:, None, None]
    x[:, :, :-1, :half] = turned.real[:, :, :-1]
    x[:, :, :-1, half : 2 * half] = turned.imag[:, :, :-1]
    pages = [p.astype(np.float64) for p in (k_pages, v_pages)]
    for i, (p, new) in enumerate(zip(pages, (x[:, :, -2], x[:, :, -1]), strict=True)):
        if kv_scales is not None:
            largest = LARGEST[k_pages.dtype.name]
            new = np.clip(new / kv_scales[i].astype(np.float64)[:, None], -largest, largest)
        p[slots // S, :, slots % S] = new
    return x[:, :, :-2].reshape(T, -1, H), *pages


def half_steps(x: np.ndarray, dtype: str) -> np.ndarray:
    """Half the distance between the numbers around x that an 8-bit type has."""
    if dtype == "int8":
        return np.full_like(x, 0.5)
    exponent = np.frexp(np.maximum(np.abs(x), 2.0**-6))[1] - 1
    return 2.0 ** (exponent - 4)


def check(case: dict[str, Any], results: Any, args: tuple[Any, ...], options: Any) -> float:
    """Relative error of the worst element that is not in 8 bits. Raises `AssertionError` for slots touched that no token
    names, and for 8-bit numbers that are not the nearest."""
    q_tnh, (k_pages, v_pages) = jax.tree.map(np.asarray, results)
    S, slots = case["page_size"], args[2]
    for before, after in zip(args[1], (k_pages, v_pages), strict=True):
        untouched = np.ones((NUM_PAGES, S), bool)
        untouched[slots // S, slots % S] = False
        rows = [x.transpose(0, 2, 1, 3)[untouched] for x in (before, after)]
        assert rows[0].tobytes() == rows[1].tobytes(), "a slot that no token names was changed"
    worst = 0.0
    for got, want in zip((q_tnh, k_pages, v_pages), expected(args, **options), strict=True):
        if got.dtype.name in LARGEST:
            error = np.abs(got.astype(np.float64) - want)
            most = half_steps(want, got.dtype.name) + 1e-5 * np.abs(want) + 1e-5
            assert (error <= most).all(), "not the nearest number"
            continue
        error = np.abs(got.astype(np.float64) - want) / np.maximum(1, np.abs(want))
        worst = max(worst, float(np.max(np.where(np.isnan(error), np.inf, error))))
    return worst


def interpret(cases: list[dict[str, Any]]) -> list[float]:
    """Errors of the interpreted kernel. Raises on a race."""
    from kernels_pallas.rope_kv_cache_update import mosaic_gpu
    from tests.kernels_pallas.mosaic_jobs import races_found

    errors = []
    for seed, case in enumerate(cases):
        errors.append(_error(mosaic_gpu, case, seed))
        assert not races_found()
    return errors


def faults(case: dict[str, Any]) -> dict[str, str]:
    """`planted_faults.outcomes`."""
    from kernels_pallas.rope_kv_cache_update import mosaic_gpu
    from tests.kernels_pallas.planted_faults import outcomes

    return outcomes(
        mosaic_gpu, QUANTIZED_FAULTS if "kv_dtype" in case else FAULTS, partial(_error, case=case)
    )


def _error(module: types.ModuleType, case: dict[str, Any], seed: int = 0) -> float:
    from tests.kernels_pallas.planted_faults import interpreted

    args, options = inputs(case, seed)
    return check(case, interpreted(module.rope_kv_cache_update, args, options), args, options)


def modules_imported_on_cpu() -> list[str]:
    """Parts of Pallas that a jitted call on the CPU has imported."""
    args, _ = inputs(dict(tokens=2, kv_heads=1, queries=1, head_size=8, page_size=2))
    jax.block_until_ready(jax.jit(rope_kv_cache_update)(*jax.tree.map(jnp.asarray, args[:5])))
    return [name for name in sys.modules if name.startswith("jax.experimental.pallas")]


def compile_for_h200(cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each case through the operation's own choice of a backend, as part of a donating program."""
    from kernels_pallas.gpu_target import compile_for, device_mesh
    from kernels_pallas.hlo_report import analyze, inputs_of
    from kernels_pallas.ptx_report import MOSAIC_DUMP, reports

    results = []
    for case in cases:
        with tempfile.TemporaryDirectory() as dump:
            os.environ.update(MOSAIC_DUMP, MOSAIC_GPU_DUMP_TO=dump)
            args, options = inputs(case)

            def step(kv_pages, packed, qkv, cos, sin, q_norm, k_norm, kv_scales, options=options):
                # A slice, as in the engine: XLA may wrap a kernel that takes one, and forget what it updates in place.
                slots = packed[8 : 8 + qkv.shape[0]]
                return rope_kv_cache_update(
                    qkv,
                    kv_pages,
                    slots,
                    cos,
                    sin,
                    q_norm=q_norm,
                    k_norm=k_norm,
                    kv_scales=kv_scales,
                    **options,
                )

            shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), args)
            qkv, pages, _, *rest = shapes
            packed = jax.ShapeDtypeStruct((64,), np.int32)
            arguments = (pages, packed, qkv, *rest)
            compiled = compile_for(device_mesh("h200"), step, arguments, donate_argnums=0)
            caches = [name for name in inputs_of(compiled.hlo) if name.startswith("kv_pages")]
            hlo = analyze(compiled.hlo, watched=dict.fromkeys(caches, 1))
            ptx = reports(Path(dump))
        results.append(
            {
                "kernels": [kernel.opcode for kernel in hlo.kernels],
                "moved": [moved.label for moved in hlo.moved],
                "alias": compiled.memory.alias,
                "cache": sum(x.size * x.dtype.itemsize for x in pages),
                "temporaries": compiled.memory.temporaries,
                "registers": [p.registers for p in ptx],
                "spilled": sum(p.spilled_bytes for p in ptx),
                "tma_loads": sum(
                    n for p in ptx for op, n in p.instructions.items()
                    if op.startswith("cp.async.bulk") and ".global.mbarrier" in op
                ),
                "proxy_fences": sum(p.count("fence.proxy.async") for p in ptx),
                "smem_vector_loads": sum(p.count("ld.shared.v") for p in ptx),
                "seconds": compiled.lower_seconds + compiled.compile_seconds,
            }
        )  # fmt: skip
    return results
