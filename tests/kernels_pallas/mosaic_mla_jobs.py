"""Jobs of test_mosaic_mla_attention: the Mosaic GPU kernels for latent attention, interpreted and compiled for the H200."""

from __future__ import annotations

import functools
import math
import os
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from mla_cases import MlaCase, errors, exact, make_batch
from mosaic_dumps import emptied, kernel_reports
from mosaic_jobs import interpret_params, races_found

TOLERANCE = 1e-2


def run_case(case: dict[str, Any], config: dict[str, Any]) -> dict[str, Any]:
    """What `mosaic_runs.problem` looks at: "errors" of `mla_cases.errors`, "holds" and "races"."""
    from kernels_pallas.mla_attention import mosaic_gpu
    from kernels_pallas.mla_attention.mosaic_gpu_config import MlaConfig

    case = MlaCase(**{"rank": 512, "rope": 64, "dtype": "bfloat16", **case})
    batch = make_batch(case)
    attend = functools.partial(
        mosaic_gpu.mla_attention,
        scale=case.scale,
        decode_only=case.decode_only,
        return_lse=True,
        config=MlaConfig(**config),
        interpret=interpret_params(),
    )
    out, lse = jax.jit(attend)(*batch.arrays)
    found = errors(case, batch, out, lse)
    return {
        "errors": {name: [error, TOLERANCE] for name, error in found.items()},
        "holds": {"zeros where no request is": not exact(out)[~batch.owned].any()},
        "races": races_found(),
    }


def compile_kernels(shapes: list[tuple[int, int, str]]) -> list[dict[str, Any]]:
    """Compiles the public function for four H200 that share the heads, by (heads of each, page size, dtype).

    One dict per kernel: what its PTX and ptxas say, and what XLA's program around it needs.
    """
    from kernels_pallas import mla_attention
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
        emptied(dump)
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
        found += [
            {
                **kernel,
                "shape": [heads, page_size, dtype],
                "temporaries": report.memory.temporaries,
                "cache": math.prod(pages.shape) * pages.dtype.itemsize,
            }
            for kernel in kernel_reports(dump)
        ]
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
