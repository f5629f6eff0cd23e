"""Runs of the Mosaic GPU decode kernels by themselves, each in a process of its own: see test_mosaic_decode."""

from __future__ import annotations

import importlib
import itertools
import os
import re
import threading
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import mosaic_attention_jobs as attention_jobs
import mosaic_prefill_jobs as batches
import numpy as np


def run_case(case: dict[str, Any], config: dict[str, Any]) -> dict[str, Any]:
    """{"error": largest relative to the largest value, "lse_error": absolute, "untouched": rows of requests left out}."""
    from kernels_pallas.ragged_paged_attention.mosaic_gpu import config as configs
    from kernels_pallas.ragged_paged_attention.mosaic_gpu import decode
    from kernels_pallas.ragged_paged_attention.mosaic_gpu.decode_shape import (
        MAX_TOKENS,
        DecodeShape,
    )

    case = batches.Case(**{**case, "rows": [tuple(row) for row in case["rows"]]})
    arrays, options = batches.make_arrays(case)
    q, starts = arrays["q"], arrays["query_start_loc"]
    most = DecodeShape.of(case.group, case.head_size, MAX_TOKENS).tokens
    assert max(np.asarray(arrays["query_lens"])) <= most, f"more than {most} tokens in {case.rows}"
    start = time.perf_counter()
    out, lse = decode.decode_attention(
        q,
        arrays["kv_pages"],
        arrays["block_tables"],
        arrays["seq_lens"],
        starts[:-1],
        arrays["query_lens"],
        **options,
        max_tokens=min(most, max(1, *(tokens for _, tokens in case.rows))),
        scale=case.head_size**-0.5,
        sliding_window=case.sliding_window,
        soft_cap=case.soft_cap,
        causal=case.causal,
        return_lse=case.return_lse,
        num_owned=starts[-1:],
        config=configs.DecodeConfig(**config),
        interpret=attention_jobs.interpret_params(),
    )
    out = np.asarray(out.astype(jnp.float32), np.float64)
    seconds = time.perf_counter() - start
    expected, expected_lse, owned = batches.oracle(case, arrays, options)
    of_no_request = np.arange(len(out)) >= np.asarray(starts)[-1]
    left = ~owned & ~of_no_request
    # A request of no context sees nothing; the oracle's float64 has nothing to say about it.
    expected[of_no_request] = 0
    told = owned | of_no_request
    difference = np.abs(out[told] - expected[told])
    lse_error = 0.0
    if case.return_lse:
        lse = np.asarray(lse, np.float64)
        seen = owned & np.isfinite(expected_lse).all(axis=1)
        lse_error = float(np.abs(lse[seen] - expected_lse[seen]).max(initial=0))
        if not np.isneginf(lse[of_no_request]).all() or not np.isnan(lse[left]).all():
            lse_error = float("inf")
    return {
        "error": float(
            difference.max(initial=0) / max(np.abs(expected[told]).max(initial=0), 1e-3)
        ),
        "lse_error": lse_error,
        "finite": bool(np.isfinite(out[told]).all()),
        "untouched": bool(np.isnan(out[left]).all()),
        "races": bool(attention_jobs.races_found()),
        "seconds": seconds,
        "jax": jax.__version__,
    }


def run_cases(cases: dict[str, tuple[dict[str, Any], dict[str, Any]]]) -> dict[str, dict[str, Any]]:
    """`run_case` of each (case, config) by name, in one process: starting one takes as long as a case."""
    return {name: run_case(*arguments) for name, arguments in cases.items()}


_MODULES = (
    "config", "tiles", "dequant", "columns", "decode_plan", "decode_shape", "merge", "decode_kernel",
    "decode",
)  # fmt: skip
"""Of `kernels_pallas.ragged_paged_attention.mosaic_gpu`, each after those that it imports."""


def run_with_fault(
    case: dict[str, Any], config: dict[str, Any], module: str, edits: list[tuple[str, str]]
) -> dict[str, Any]:
    """`run_case` with text of a module replaced: each edit's old text must occur in it.

    Ends with `attention_jobs.STUCK` on stderr when the kernel waits for what never comes.
    """
    threading.Thread(target=attention_jobs._end_when_stuck, daemon=True).start()
    for name in _MODULES:
        loaded = importlib.import_module(f"kernels_pallas.ragged_paged_attention.mosaic_gpu.{name}")
        source = Path(loaded.__file__).read_text()
        if name == module:
            for old, new in edits:
                if old not in source:
                    raise LookupError(f"{module} has no {old!r}")
                source = source.replace(old, new)
        exec(compile(source, loaded.__file__, "exec"), loaded.__dict__)
    return run_case(case, config)


def compile_decode(
    head_sizes: list[int],
    page_sizes: list[int],
    dtypes: list[tuple[str, str]],
    shapes: list[tuple[int, int]],
    options: list[dict[str, Any]],
) -> list[dict[str, Any]]:
    """Compiles decode and merge for the H200 and reads PTX and ptxas' report, one dict per combination and kernel.

    Args:
        dtypes: pairs of the queries' and the pages'.
        shapes: (query heads per kv head, most tokens per request).
        options: "sinks" of True stands for an array; "mixed" for tokens of no request.
    """
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
    for head_size, page_size, (dtype, page_dtype), (group, tokens), given in itertools.product(
        head_sizes, page_sizes, dtypes, shapes, options
    ):
        for path in dump.iterdir():
            path.unlink()
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
        for path in sorted(dump.glob("*.ptx")):
            ptx = path.read_text()
            log = path.with_suffix(".ptxas").read_text(errors="replace")
            kernel = re.sub(r"_\d+$", "", path.stem)
            resources = "".join(p.read_text() for p in dump.glob(f"{kernel}_[0-9]*.resources.txt"))
            shared = re.search(r"smem_scratch_bytes=(\d+)", resources)
            reports.append(
                {
                    "kernel": kernel,
                    "head_size": head_size,
                    "page_size": page_size,
                    "dtype": dtype,
                    "page_dtype": page_dtype,
                    "group": group,
                    "tokens": shape.tokens,
                    "columns": shape.columns,
                    **given,
                    "registers": int(re.search(r"Used (\d+) registers", log)[1]),
                    "spills": sum(int(n) for n in re.findall(r"(\d+) bytes spill", log)),
                    "shared_memory": int(shared[1]) if shared else None,
                    "budget": config.shared_memory(head_size, shape.columns, itemsize),
                    "slots": config.slots,
                    "blocks_per_core": config.blocks_per_core,
                    "in_flight": config.bytes_in_flight(head_size, itemsize),
                    "wgmma": ptx.count("wgmma.mma_async"),
                    "tma": ptx.count("cp.async.bulk.tensor"),
                    "fences": ptx.count("fence.proxy.async"),
                }
            )
    return reports
