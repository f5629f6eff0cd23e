"""cuDNN's attention through JAX on keys and values that lie in one piece: what paging is compared with."""

from __future__ import annotations

import functools
from typing import Any

import jax

from benchmarks.gpu import calls
from benchmarks.gpu.batches import Heads, attention_bytes, attention_flops, random_array
from benchmarks.gpu.cases import Case, Context
from benchmarks.gpu.timing import L2_BYTES, rotating, settings, time_calls


def attend(heads: Heads, causal: bool) -> Any:
    """On [B, T, N, H] and [B, S, K, H]; on a CPU, which has no cuDNN, the same call by XLA."""
    return jax.jit(
        functools.partial(
            jax.nn.dot_product_attention,
            scale=heads.size**-0.5,
            is_causal=causal,
            implementation="cudnn" if calls.on_gpu() else "xla",
        )
    )


def arrays(heads: Heads, requests: int, query: int, context: int, seed: int = 0) -> tuple:
    kv_shape = (requests, context, heads.kv, heads.size)
    return (
        random_array((requests, query, heads.queries, heads.size), "bfloat16", 1.0, seed + 1),
        random_array(kv_shape, "bfloat16", 1.0, seed + 2),
        random_array(kv_shape, "bfloat16", 1.0, seed + 3),
    )


def decode_case(context: Context, heads: Heads, requests: int, tokens: int) -> Case:
    def run() -> dict[str, Any]:
        moved = attention_bytes(heads, [(tokens, 1)] * requests)
        sets = min(8, max(1, -(-4 * L2_BYTES // moved)))
        inputs = [arrays(heads, requests, 1, tokens, 3 * i) for i in range(sets)]
        program = attend(heads, causal=False)
        timing = time_calls(rotating(program, inputs), **settings(context.dry))
        floor = moved / context.bandwidth
        return _values(timing, floor, "copy bandwidth")

    return Case(f"{requests} x {tokens} contiguous, cuDNN", run)


def prefill_case(context: Context, heads: Heads, requests: int, tokens: int) -> Case:
    def run() -> dict[str, Any]:
        inputs = [arrays(heads, requests, tokens, tokens)]
        program = attend(heads, causal=True)
        timing = time_calls(rotating(program, inputs), **settings(context.dry))
        floor = attention_flops(heads, [(tokens, tokens)] * requests) / context.matmul
        return _values(timing, floor, "matmul peak")

    return Case(f"{requests} x {tokens} contiguous, cuDNN", run)


def _values(timing: Any, floor: float, of: str) -> dict[str, Any]:
    values = {
        **timing.values(),
        "floor_seconds": floor,
        "fraction": floor / timing.seconds,
        "of": of,
    }
    return values if calls.on_gpu() else values | {"note": "XLA instead of cuDNN"}
