"""Jobs of test_mosaic_decode: the Mosaic GPU decode kernels by themselves, interpreted and compiled for the H200."""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import mosaic_batches as batches
import numpy as np
from mosaic_dumps import emptied, kernel_reports
from mosaic_jobs import interpret_params, races_found


def run_case(case: dict[str, Any], config: dict[str, Any]) -> dict[str, Any]:
    """`batches.compared`, and {"races"}."""
    from kernels_pallas.ragged_paged_attention.mosaic_gpu import config as configs
    from kernels_pallas.ragged_paged_attention.mosaic_gpu import decode
    from kernels_pallas.ragged_paged_attention.mosaic_gpu.decode_shape import (
        MAX_TOKENS,
        DecodeShape,
    )

    case = batches.Case.of(case)
    arrays, options = batches.make_arrays(case)
    q, starts = arrays["q"], arrays["query_start_loc"]
    most = DecodeShape.of(case.group, case.head_size, MAX_TOKENS).tokens
    assert max(np.asarray(arrays["query_lens"])) <= most, f"more than {most} tokens in {case.rows}"
    attend = functools.partial(
        decode.decode_attention,
        max_tokens=min(most, max(1, *(tokens for _, tokens in case.rows))),
        scale=case.head_size**-0.5,
        sliding_window=case.sliding_window,
        soft_cap=case.soft_cap,
        causal=case.causal,
        return_lse=case.return_lse,
        config=configs.DecodeConfig(**config),
        interpret=interpret_params(),
    )
    positional = (
        q,
        arrays["kv_pages"],
        arrays["block_tables"],
        arrays["seq_lens"],
        starts[:-1],
        arrays["query_lens"],
    )
    out, lse = jax.jit(attend)(*positional, num_owned=starts[-1:], **options)
    compared = batches.compared(case, arrays, options, out, lse, zeros=True, left_lse=np.nan)
    return {**compared, "races": races_found()}


Combination = tuple[int, int, tuple[str, str], tuple[int, int], dict[str, Any]]
"""Head size, page size, dtypes of the queries and the pages, (query heads per kv head, most tokens per request), options:
"sinks" of True stands for an array, "mixed" for tokens of no request."""


def compile_decode(combinations: list[Combination]) -> list[dict[str, Any]]:
    """Compiles decode and merge for the H200: `kernel_reports`, with what was compiled."""
    from kernels_pallas.gpu_target import compile_for, device_mesh
    from kernels_pallas.ragged_paged_attention.mosaic_gpu import config as configs
    from kernels_pallas.ragged_paged_attention.mosaic_gpu import decode
    from kernels_pallas.ragged_paged_attention.mosaic_gpu.decode_shape import DecodeShape

    dump = Path(os.environ["MOSAIC_GPU_DUMP_TO"])
    mesh = device_mesh("h200")
    kv_heads, num_rows = 8, 16
    integers = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.int32)  # noqa: E731
    floats = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)  # noqa: E731
    reports = []
    for head_size, page_size, (dtype, page_dtype), (group, tokens), given in combinations:
        emptied(dump)
        itemsize = jnp.dtype(page_dtype).itemsize
        shape = DecodeShape.of(group, head_size, tokens)
        config = configs.decode_config(head_size, shape.columns, itemsize)
        q = jax.ShapeDtypeStruct((256, kv_heads * group, head_size), dtype)
        pages = jax.ShapeDtypeStruct((512, kv_heads, page_size, head_size), page_dtype)
        statics = {"scale": 0.1, "sliding_window": None, "soft_cap": None, **given}
        arrays = {}
        if statics.pop("sinks", False):
            arrays["sinks"] = floats(q.shape[1])
        if itemsize == 1:
            arrays["kv_scales"] = (floats(kv_heads), floats(kv_heads))
        if statics.pop("mixed", False):
            arrays["num_owned"] = integers(1)

        def attend(positional, arrays, config=config, statics=statics, tokens=tokens):
            return decode.decode_attention(
                *positional, **arrays, max_tokens=tokens, config=config, **statics
            )

        rows = integers(num_rows)
        compile_for(
            mesh, attend, ((q, (pages, pages), integers(num_rows, 128), *[rows] * 3), arrays)
        )
        reports += [
            {
                **report,
                "head_size": head_size,
                "page_size": page_size,
                "dtype": dtype,
                "page_dtype": page_dtype,
                "group": group,
                "tokens": shape.tokens,
                "columns": shape.columns,
                **given,
                "budget": config.shared_memory(head_size, shape.columns, itemsize),
                "slots": config.slots,
                "blocks_per_core": config.blocks_per_core,
                "in_flight": config.bytes_in_flight(head_size, itemsize),
            }
            for report in kernel_reports(dump)
        ]
    return reports
