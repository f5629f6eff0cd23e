"""Runs of the Mosaic GPU attention backend in the interpreter, each in a process of its own: see test_mosaic_attention."""

from __future__ import annotations

import dataclasses
import functools
import logging
import os
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import mosaic_gpu as plgpu


@dataclasses.dataclass(frozen=True)
class Case:
    """A ragged batch: `rows` are (context length, query tokens) per request, an empty request is (0, 0)."""

    rows: list[tuple[int, int]]
    head_size: int = 64
    kv_heads: int = 2
    group: int = 4
    page_size: int = 16
    dtype: str = "bfloat16"
    sliding_window: int | None = None
    soft_cap: float | None = None
    decode_only: bool = False
    padding_tokens: int = 0
    seed: int = 0


def make_arrays(case: Case) -> tuple[tuple[Any, ...], np.ndarray]:
    """The call's arrays and a mask [T] of tokens that belong to a request. What nobody may read is NaN."""
    rng = np.random.default_rng(case.seed)
    size, num_rows = case.page_size, len(case.rows)
    pages_per_row = max(-(-max(seq_len for seq_len, _ in case.rows) // size), 1) + 1
    num_pages = sum(-(-seq_len // size) for seq_len, _ in case.rows) + 2
    shape = (num_pages, case.kv_heads, size, case.head_size)
    k_pages, v_pages = np.full(shape, np.nan), np.full(shape, np.nan)
    free = list(rng.permutation(np.arange(1, num_pages)))
    block_tables = np.full((num_rows, pages_per_row), free.pop(), np.int32)
    seq_lens = np.array([seq_len for seq_len, _ in case.rows], np.int32)
    starts = np.concatenate([[0], np.cumsum([tokens for _, tokens in case.rows])]).astype(np.int32)
    for row, (seq_len, query_len) in enumerate(case.rows):
        # The first position that a token of the request may see: pages before it hold NaN.
        first = 0
        if case.sliding_window is not None:
            first = max(seq_len - query_len + 1 - case.sliding_window, 0)
        for index in range(-(-seq_len // size)):
            page = block_tables[row, index] = free.pop()
            used = min(size, seq_len - index * size)
            if (index + 1) * size <= first:
                continue
            for pages in (k_pages, v_pages):
                pages[page, :, :used] = rng.normal(size=(shape[1], used, shape[3]))
    num_tokens = num_rows if case.decode_only else int(starts[-1]) + case.padding_tokens
    q = rng.normal(size=(num_tokens, case.kv_heads * case.group, case.head_size))
    owned = np.arange(num_tokens) < starts[-1]
    if case.decode_only:
        owned = seq_lens > 0
    pages = (jnp.asarray(k_pages, case.dtype), jnp.asarray(v_pages, case.dtype))
    integers = (jnp.asarray(block_tables), jnp.asarray(seq_lens), jnp.asarray(starts))
    return (jnp.asarray(q, case.dtype), pages, *integers), owned


def oracle(case: Case, arrays: tuple[Any, ...]) -> np.ndarray:
    """Token by token in float64 numpy, from the arrays as rounded; zeros for tokens of no request."""
    q, k_pages, v_pages = (
        np.asarray(x.astype(jnp.float32), np.float64) for x in (arrays[0], *arrays[1])
    )
    block_tables, seq_lens, starts = (np.asarray(x) for x in arrays[2:])
    out = np.zeros_like(q)
    for row, seq_len in enumerate(seq_lens):
        first, last = (row, row + 1) if case.decode_only else (starts[row], starts[row + 1])
        for token in range(first, last) if seq_len else ():
            position = seq_len - last + token
            begin = 0
            if case.sliding_window is not None:
                begin = max(0, position + 1 - case.sliding_window)
            seen = np.arange(begin, position + 1)
            page, offset = block_tables[row, seen // case.page_size], seen % case.page_size
            for head in range(q.shape[1]):
                score = k_pages[page, head // case.group, offset] @ q[token, head]
                score *= case.head_size**-0.5
                if case.soft_cap is not None:
                    score = case.soft_cap * np.tanh(score / case.soft_cap)
                weight = np.exp(score - score.max())
                values = v_pages[page, head // case.group, offset]
                out[token, head] = weight @ values / weight.sum()
    return out


def interpret_params() -> Any:
    return plgpu.InterpretGPUParams(detect_races=True, num_tma_threads_per_device=64)


def races_found() -> bool:
    """JAX 0.11 notes a race; 0.12 raises on it."""
    try:
        from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks as state

        return state.get_races().races_found
    except (ImportError, AttributeError):
        from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call as state

        return state.get_races().races_found


def run_case(case: dict[str, Any], configs: dict[str, Any] | None = None) -> dict[str, Any]:
    """{"error": largest error relative to the largest value, "finite", "zeros", "races", "seconds"}."""
    from kernels_pallas.ragged_paged_attention.mosaic_gpu import attention
    from kernels_pallas.ragged_paged_attention.mosaic_gpu import config as sizes

    case = Case(**{**case, "rows": [tuple(row) for row in case["rows"]]})
    arrays, owned = make_arrays(case)
    options = {}
    for name, values in (configs or {}).items():
        kind = {"decode_config": "DecodeConfig", "prefill_config": "PrefillConfig"}[name]
        options[name] = getattr(sizes, kind)(**values)
    start = time.perf_counter()
    out = attention.ragged_paged_attention(
        *arrays,
        scale=case.head_size**-0.5,
        sliding_window=case.sliding_window,
        soft_cap=case.soft_cap,
        decode_only=case.decode_only,
        interpret=interpret_params(),
        **options,
    )
    out = np.asarray(out.astype(jnp.float32), np.float64)
    seconds = time.perf_counter() - start
    expected = oracle(case, arrays)
    return {
        "error": float(np.abs(out - expected).max() / max(np.abs(expected).max(), 1e-3)),
        "finite": bool(np.isfinite(out).all()),
        "zeros": not out[~owned].any(),
        "races": bool(races_found()),
        "seconds": seconds,
        "jax": jax.__version__,
    }


STUCK = "no progress"


def _end_when_stuck(interval: float = 5.0) -> None:
    """Threads that wait for a barrier use no CPU time; anything else does, however busy the machine is."""
    idle = 0
    while idle < 2:
        before = time.process_time()
        time.sleep(interval)
        idle = idle + 1 if time.process_time() - before < 0.02 else 0
    print(STUCK, file=sys.stderr, flush=True)
    os._exit(3)


def chosen_backend(
    num_devices: int, dtype: str = "bfloat16", head_size: int = 128, page_size: int = 16
) -> dict[str, Any]:
    """Compiles the public function for the H200 twice, cut over `num_devices` by kv heads."""
    from jax.sharding import NamedSharding, PartitionSpec

    from kernels_pallas import ragged_paged_attention
    from kernels_pallas.gpu_target import compile_for, device_mesh
    from kernels_pallas.hlo_report import analyze, inputs_of

    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    log = logging.getLogger("kernels_pallas")
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    mesh = device_mesh("h200", num_devices)
    attend = functools.partial(ragged_paged_attention, scale=0.1)
    heads, whole = PartitionSpec(None, "x"), PartitionSpec()
    specs = (heads, (heads, heads), whole, whole, whole)
    sharded = jax.shard_map(attend, mesh=mesh, in_specs=specs, out_specs=heads)

    def array(spec: Any, dtype: Any, *shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))

    for num_tokens in (64, 128):
        pages = array(heads, dtype, 512, 8, page_size, head_size)
        args = (
            array(heads, dtype, num_tokens, 32, head_size),
            (pages, pages),
            array(whole, jnp.int32, 16, 64),
            array(whole, jnp.int32, 16),
            array(whole, jnp.int32, 17),
        )
        report = compile_for(mesh, sharded if num_devices > 1 else attend, args)
    watched = {f"args[1][{i}]": 1 << 20 for i in range(2)}
    names = [name for name in inputs_of(report.hlo) if "kv_pages" in name or name in watched]
    moved = analyze(report.hlo, watched=dict.fromkeys(names, 1 << 20)).moved
    return {
        "mosaic_kernels": report.hlo.count('custom_call_target="mosaic_gpu'),
        "log": messages,
        "pages_moved": [copy.label for copy in moved],
        "page_inputs": names,
    }
