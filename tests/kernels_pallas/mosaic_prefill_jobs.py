"""Jobs of test_mosaic_prefill: the Mosaic GPU prefill kernel by itself, interpreted and compiled for the H200."""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import mosaic_batches as batches
from mosaic_dumps import emptied, kernel_reports
from mosaic_jobs import interpret_params, races_found


def run_case(case: dict[str, Any], config: dict[str, Any]) -> dict[str, Any]:
    """`batches.compared`, and {"races"}."""
    from kernels_pallas.ragged_paged_attention.mosaic_gpu import config as configs
    from kernels_pallas.ragged_paged_attention.mosaic_gpu import prefill

    case = batches.Case.of(case)
    arrays, options = batches.make_arrays(case)
    attend = functools.partial(
        prefill.prefill_attention,
        scale=case.head_size**-0.5,
        sliding_window=case.sliding_window,
        soft_cap=case.soft_cap,
        causal=case.causal,
        return_lse=case.return_lse,
        config=configs.PrefillConfig(**config),
        interpret=interpret_params(),
    )
    out, lse = jax.jit(attend)(*arrays.values(), **options)
    compared = batches.compared(case, arrays, options, out, lse, zeros=False)
    return {**compared, "races": races_found()}


Combination = tuple[int, int, tuple[str, str], dict[str, Any]]
"""Head size, page size, dtypes of the queries and the pages, options: "sinks" of True stands for an array."""


def compile_prefill(combinations: list[Combination]) -> list[dict[str, Any]]:
    """Compiles the kernel for the H200: `kernel_reports`, with what was compiled."""
    from kernels_pallas.gpu_target import compile_for, device_mesh
    from kernels_pallas.ragged_paged_attention.mosaic_gpu import config as configs
    from kernels_pallas.ragged_paged_attention.mosaic_gpu import prefill

    dump = Path(os.environ["MOSAIC_GPU_DUMP_TO"])
    mesh = device_mesh("h200")
    num_tokens, num_heads, kv_heads, num_rows = 4096, 32, 8, 16
    integers = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.int32)  # noqa: E731
    floats = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)  # noqa: E731
    reports = []
    for head_size, page_size, (dtype, page_dtype), given in combinations:
        emptied(dump)
        itemsize = jnp.dtype(page_dtype).itemsize
        config = configs.prefill_config(head_size, itemsize)
        pages = jax.ShapeDtypeStruct((512, kv_heads, page_size, head_size), page_dtype)
        arrays = {}
        if given.get("sinks"):
            arrays["sinks"] = floats(num_heads)
        if itemsize == 1:
            arrays["kv_scales"] = (floats(kv_heads), floats(kv_heads))
        statics = {"scale": 0.1, **{k: v for k, v in given.items() if k != "sinks"}}

        def attend(positional, arrays, config=config, statics=statics):
            return prefill.prefill_attention(*positional, **arrays, config=config, **statics)

        positional = (
            jax.ShapeDtypeStruct((num_tokens, num_heads, head_size), dtype),
            (pages, pages),
            integers(num_rows, 128),
            integers(num_rows),
            integers(num_rows + 1),
            integers(num_rows),
        )
        compile_for(mesh, attend, (positional, arrays))
        reports += [
            {
                **report,
                "head_size": head_size,
                "page_size": page_size,
                "dtype": dtype,
                "page_dtype": page_dtype,
                **given,
                "budget": config.shared_memory(head_size, 2, itemsize),
                "in_flight": config.bytes_in_flight(head_size, itemsize),
            }
            for report in kernel_reports(dump)
        ]
    return reports
