"""Runs of the Mosaic GPU prefill kernel by itself, each in a process of its own: see test_mosaic_prefill."""

from __future__ import annotations

import dataclasses
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
import numpy as np


@dataclasses.dataclass(frozen=True)
class Case:
    """A ragged batch: `rows` are (context length, query tokens) per request, an empty request is (0, 0)."""

    rows: list[tuple[int, int]]
    head_size: int = 64
    kv_heads: int = 1
    group: int = 4
    page_size: int = 16
    dtype: str = "bfloat16"
    page_dtype: str | None = None
    sliding_window: int | None = None
    soft_cap: float | None = None
    causal: bool = True
    sinks: bool = False
    return_lse: bool = False
    padding_tokens: int = 0
    left_out: list[int] = dataclasses.field(default_factory=list)
    """Requests that the kernel is told to skip."""
    seed: int = 0

    @property
    def pages(self) -> str:
        return self.page_dtype or self.dtype


# So that keys and values come out about as large as normal ones.
_SPREAD = {"float8_e4m3fn": 8.0, "int8": 30.0}


def make_arrays(case: Case) -> tuple[dict[str, Any], dict[str, Any]]:
    """Positional and keyword arrays of `prefill_attention` by name. What nobody may read is NaN (127 in int8)."""
    rng = np.random.default_rng(case.seed)
    size, num_rows, spread = case.page_size, len(case.rows), _SPREAD.get(case.pages, 1.0)
    num_pages = sum(-(-seq_len // size) for seq_len, _ in case.rows) + 2
    shape = (num_pages, case.kv_heads, size, case.head_size)
    poison = 127 if case.pages == "int8" else np.nan
    k_pages, v_pages = np.full(shape, poison), np.full(shape, poison)
    free = list(rng.permutation(np.arange(1, num_pages)))
    width = max(max(-(-seq_len // size) for seq_len, _ in case.rows), 1) + 1
    block_tables = np.full((num_rows, width), free.pop(), np.int32)
    for row, (seq_len, query_len) in enumerate(case.rows):
        first = 0
        if case.sliding_window is not None:
            first = max(seq_len - query_len + 1 - case.sliding_window, 0)
        for index in range(-(-seq_len // size)):
            page = block_tables[row, index] = free.pop()
            used = min(size, seq_len - index * size)
            # Pages wholly before the window stay poisoned.
            if (index + 1) * size > first:
                for pages in (k_pages, v_pages):
                    pages[page, :, :used] = spread * rng.normal(size=(shape[1], used, shape[3]))
    query_lens = np.array([tokens for _, tokens in case.rows], np.int32)
    starts = np.concatenate([[0], np.cumsum(query_lens)]).astype(np.int32)
    query_lens[case.left_out] = 0
    num_heads = case.kv_heads * case.group
    q = rng.normal(size=(int(starts[-1]) + case.padding_tokens, num_heads, case.head_size))
    if case.pages == "int8":
        k_pages, v_pages = (np.clip(np.round(x), -128, 127) for x in (k_pages, v_pages))
    arrays = {
        "q": jnp.asarray(q, case.dtype),
        "kv_pages": (jnp.asarray(k_pages, case.pages), jnp.asarray(v_pages, case.pages)),
        "block_tables": jnp.asarray(block_tables),
        "seq_lens": jnp.asarray([seq_len for seq_len, _ in case.rows], jnp.int32),
        "query_start_loc": jnp.asarray(starts),
        "query_lens": jnp.asarray(query_lens),
    }
    options: dict[str, Any] = {}
    if case.sinks:
        options["sinks"] = jnp.asarray(rng.normal(size=num_heads) * 2, jnp.float32)
    if spread != 1.0:
        scales = rng.uniform(0.5, 1.5, size=(2, case.kv_heads)) / spread
        options["kv_scales"] = tuple(jnp.asarray(scales, jnp.float32))
    return arrays, options


def oracle(
    case: Case, arrays: dict[str, Any], options: dict[str, Any]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(out, lse, owned [T]) in float64 numpy from the arrays as rounded; NaN and -inf where nothing is owed."""
    wide = lambda x: np.asarray(x.astype(jnp.float32), np.float64)  # noqa: E731
    q, k_pages, v_pages = wide(arrays["q"]), *map(wide, arrays["kv_pages"])
    k_scale, v_scale = (
        np.asarray(s, np.float64) for s in options.get("kv_scales", np.ones((2, case.kv_heads)))
    )
    tables, starts = np.asarray(arrays["block_tables"]), np.asarray(arrays["query_start_loc"])
    out, lse = np.full(q.shape, np.nan), np.full(q.shape[:2], -np.inf)
    owned = np.zeros(len(q), bool)
    for row, (seq_len, query_len) in enumerate(case.rows):
        if query_len == 0 or row in case.left_out:
            continue
        tokens = slice(starts[row], starts[row] + query_len)
        owned[tokens] = True
        if seq_len == 0:
            out[tokens] = 0
            continue
        slots = np.arange(seq_len)
        distance = np.arange(seq_len - query_len, seq_len)[:, None] - slots[None, :]
        seen = np.ones_like(distance, bool)
        if case.causal:
            seen = distance >= 0
        if case.sliding_window is not None:
            seen &= distance < case.sliding_window
        pages = tables[row, slots // case.page_size], slots % case.page_size
        for head in range(q.shape[1]):
            kv_head = head // case.group
            keys = k_pages[pages[0], kv_head, pages[1]] * k_scale[kv_head]
            values = v_pages[pages[0], kv_head, pages[1]] * v_scale[kv_head]
            scores = q[tokens, head] @ keys.T * case.head_size**-0.5
            if case.soft_cap is not None:
                scores = case.soft_cap * np.tanh(scores / case.soft_cap)
            scores = np.where(seen, scores, -np.inf)
            values = np.where(seen.any(0)[:, None], values, 0)
            sink = float(options["sinks"][head]) if case.sinks else -np.inf
            peak = np.maximum(scores.max(1), sink)
            weights = np.exp(scores - peak[:, None])
            total = weights.sum(1) + np.exp(sink - peak)
            out[tokens, head] = weights @ values / total[:, None]
            lse[tokens, head] = peak + np.log(total)
    return out, lse, owned


def run_case(case: dict[str, Any], config: dict[str, Any]) -> dict[str, Any]:
    """ "error": largest relative to the largest value, "lse_error": absolute, "untouched": rows that are not owed."""
    from kernels_pallas.ragged_paged_attention.mosaic_gpu import config as configs
    from kernels_pallas.ragged_paged_attention.mosaic_gpu import prefill

    case = Case(**{**case, "rows": [tuple(row) for row in case["rows"]]})
    arrays, options = make_arrays(case)
    start = time.perf_counter()
    out, lse = prefill.prefill_attention(
        *arrays.values(),
        **options,
        scale=case.head_size**-0.5,
        sliding_window=case.sliding_window,
        soft_cap=case.soft_cap,
        causal=case.causal,
        return_lse=case.return_lse,
        config=configs.PrefillConfig(**config),
        interpret=attention_jobs.interpret_params(),
    )
    out = np.asarray(out.astype(jnp.float32), np.float64)
    seconds = time.perf_counter() - start
    expected, expected_lse, owned = oracle(case, arrays, options)
    largest = max(np.abs(expected[owned]).max(), 1e-3) if owned.any() else 1.0
    lse_error = 0.0
    if case.return_lse:
        lse = np.asarray(lse, np.float64)
        sees_nothing = np.isneginf(expected_lse)
        lse_error = float(np.abs(lse[~sees_nothing] - expected_lse[~sees_nothing]).max())
        if not np.isneginf(lse[sees_nothing]).all():
            lse_error = float("inf")
    return {
        "error": float(np.abs(out[owned] - expected[owned]).max() / largest) if owned.any() else 0,
        "lse_error": lse_error,
        "finite": bool(np.isfinite(out[owned]).all()),
        "untouched": bool(np.isnan(out[~owned]).all()),
        "races": bool(attention_jobs.races_found()),
        "seconds": seconds,
        "jax": jax.__version__,
    }


_MODULES = (
    "config", "tiles", "dequant", "prefill_plan", "prefill_work", "prefill_producer",
    "prefill_consumer", "prefill_kernel", "prefill",
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


def compile_prefill(
    head_size: int,
    page_sizes: list[int],
    dtypes: list[tuple[str, str]],
    options: list[dict[str, Any]],
) -> list[dict[str, Any]]:
    """Compiles the kernel for the H200 and reads PTX and ptxas' report, one dict per combination.

    `dtypes` are pairs of the queries' and the pages'. An option "sinks" of True stands for an array.
    """
    from kernels_pallas.gpu_target import compile_for, device_mesh
    from kernels_pallas.ragged_paged_attention.mosaic_gpu import config as configs
    from kernels_pallas.ragged_paged_attention.mosaic_gpu import prefill

    dump = Path(os.environ["MOSAIC_GPU_DUMP_TO"])
    mesh = device_mesh("h200")
    num_tokens, num_heads, kv_heads, num_rows = 4096, 32, 8, 16
    integers = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.int32)  # noqa: E731
    floats = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)  # noqa: E731
    reports = []
    for page_size, (dtype, page_dtype), given in itertools.product(page_sizes, dtypes, options):
        for path in dump.iterdir():
            path.unlink()
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
        (path,) = dump.glob("paged_prefill_*.ptx")
        ptx, log = path.read_text(), path.with_suffix(".ptxas").read_text()
        resources = "".join(p.read_text() for p in dump.glob("paged_prefill_*.resources.txt"))
        shared = re.search(r"smem_scratch_bytes=(\d+)", resources)
        matmuls = re.findall(r"wgmma\.mma_async|wgmma\.wait_group\S* \d", ptx)
        reports.append(
            {
                "head_size": head_size,
                "page_size": page_size,
                "dtype": dtype,
                "page_dtype": page_dtype,
                **given,
                "registers": int(re.search(r"Used (\d+) registers", log)[1]),
                "spills": sum(int(n) for n in re.findall(r"(\d+) bytes spill", log)),
                "serialized": "serialized" in log,
                "shared_memory": int(shared[1]) if shared else None,
                "budget": config.shared_memory(head_size, 2, itemsize),
                "in_flight": config.bytes_in_flight(head_size, itemsize),
                "wgmma": sum("mma_async" in m for m in matmuls),
                "overlapped_waits": sum(m.endswith(" 1") for m in matmuls),
                "tma": ptx.count("cp.async.bulk.tensor"),
                "fences": ptx.count("fence.proxy.async"),
            }
        )
    return reports
