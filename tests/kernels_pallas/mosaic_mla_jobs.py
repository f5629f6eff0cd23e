"""Runs of the Mosaic GPU kernels for latent attention, each in a process of its own: see test_mosaic_mla_attention."""

from __future__ import annotations

import functools
import importlib
import math
import os
import re
import threading
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from mla_cases import MlaCase, errors, exact, make_batch
from mosaic_attention_jobs import _end_when_stuck, interpret_params, races_found

PACKAGE = "kernels_pallas.mla_attention.mosaic_gpu"
_MODULES = ("_config", "_plan", "_memory", "_attend", "_merge", "")
"""Of `PACKAGE`, each after those that it imports."""


def run_case(case: dict[str, Any], config: dict[str, Any] | None = None) -> dict[str, Any]:
    """{"errors" of `mla_cases.errors`, "zeros": tokens of no request are, "races"} in the interpreter."""
    from kernels_pallas.mla_attention import mosaic_gpu
    from kernels_pallas.mla_attention.mosaic_gpu_config import MlaConfig

    case = MlaCase(**{"rank": 512, "rope": 64, "dtype": "bfloat16", **case})
    batch = make_batch(case)
    out, lse = mosaic_gpu.mla_attention(
        *batch.arrays,
        scale=case.scale,
        decode_only=case.decode_only,
        return_lse=True,
        config=MlaConfig(**config) if config else None,
        interpret=interpret_params(),
    )
    return {
        "errors": errors(case, batch, out, lse),
        "zeros": not exact(out)[~batch.owned].any(),
        "races": bool(races_found()),
    }


def run_cases(cases: dict[str, Any]) -> dict[str, Any]:
    """`run_case` of each (case, config)."""
    return {name: run_case(case, config) for name, (case, config) in cases.items()}


def run_with_fault(
    case: dict[str, Any], config: dict[str, Any], module: str, edits: list[tuple[str, str]]
) -> dict[str, Any]:
    """`run_case` with text of a module replaced: each edit's old text must occur in it once.

    Ends with `mosaic_attention_jobs.STUCK` on stderr when the kernel waits for what never comes.
    """
    threading.Thread(target=_end_when_stuck, daemon=True).start()
    for name in _MODULES:
        loaded = importlib.import_module(PACKAGE + name)
        source = Path(loaded.__file__).read_text()
        if name == module:
            for old, new in edits:
                if source.count(old) != 1:
                    raise LookupError(f"{module} has {source.count(old)} times {old!r}")
                source = source.replace(old, new)
        exec(compile(source, loaded.__file__, "exec"), loaded.__dict__)
    return run_case(case, config)


def compile_kernels(shapes: list[tuple[int, int, str]]) -> list[dict[str, Any]]:
    """Compiles the public function for four H200 that share the heads, by (heads of each, page size, dtype).

    One dict per kernel: what its PTX and ptxas say, and what XLA's program around it needs.
    """
    from kernels_pallas import mla_attention, ptx_report
    from kernels_pallas.gpu_target import compile_for, device_mesh

    dump = Path(os.environ["MOSAIC_GPU_DUMP_TO"])
    mesh = device_mesh("h200", 4)
    by_heads, whole = PartitionSpec(None, "x"), PartitionSpec()
    attend = jax.shard_map(
        functools.partial(mla_attention, scale=0.1, return_lse=True),
        mesh=mesh,
        in_specs=(by_heads, by_heads, whole, whole, whole, whole),
        out_specs=(by_heads, by_heads),
    )

    def array(dtype: Any, *shape: int, spec: PartitionSpec = whole) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))

    found = []
    for heads, page_size, dtype in shapes:
        for path in dump.iterdir():
            path.unlink()
        pages = array(dtype, 65536 // page_size, page_size, 576)
        args = (
            array(dtype, 64, 4 * heads, 512, spec=by_heads),
            array(dtype, 64, 4 * heads, 64, spec=by_heads),
            pages,
            array(jnp.int32, 64, 4096 // page_size),
            array(jnp.int32, 64),
            array(jnp.int32, 65),
        )
        report = compile_for(mesh, attend, args)
        for path in sorted(dump.glob("*.ptx")):
            kernel, ptx = ptx_report.report(path), path.read_text()
            name = kernel.kernel.removesuffix("_mosaic_gpu_kernel")
            resources = "".join(p.read_text() for p in dump.glob(f"{name}_*.resources.txt"))
            shared = re.search(r"smem_scratch_bytes=(\d+)", resources)
            found.append(
                {
                    "shape": [heads, page_size, dtype],
                    "kernel": name,
                    "registers": kernel.registers,
                    "spilled": kernel.spilled_bytes,
                    "shared_memory": int(shared[1]) if shared else None,
                    "wgmma": ptx.count("wgmma.mma_async"),
                    "tma": ptx.count("cp.async.bulk.tensor"),
                    "fences": ptx.count("fence.proxy.async"),
                    "temporaries": report.memory.temporaries,
                    "cache": math.prod(pages.shape) * pages.dtype.itemsize,
                }
            )
    return found


def compile_update() -> dict[str, int]:
    """Compiles the cache update for the H200 with the cache donated: bytes, and the kernels of the program."""
    from kernels_pallas import mla_cache_update
    from kernels_pallas.gpu_target import compile_for, device_mesh

    shapes = ((4096, 64, 576), (64, 512), (64, 64))
    args = (
        *(jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes),
        jax.ShapeDtypeStruct((64,), jnp.int32),
    )
    report = compile_for(device_mesh("h200"), mla_cache_update, args, donate_argnums=0)
    entry = report.hlo[report.hlo.index("\nENTRY") :]
    return {
        "aliased": report.memory.alias,
        "cache": math.prod(shapes[0]) * 2,
        "temporaries": report.memory.temporaries,
        "kernels": len(re.findall(r" (?:fusion|copy|scatter|custom-call)\(", entry)),
    }
