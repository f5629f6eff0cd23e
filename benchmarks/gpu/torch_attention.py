"""PyTorch's scaled_dot_product_attention, by each of its backends, on contiguous keys and values of the same shapes."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable
from typing import Any

from benchmarks.gpu.batches import LLAMA_8B, Heads, attention_bytes, attention_flops
from benchmarks.gpu.cases import Case, Context
from benchmarks.gpu.results import NotAvailable
from benchmarks.gpu.timing import L2_BYTES

DECODES = ((64, 4096), (16, 8192), (1, 131_072))
PROMPTS = ((1, 8192), (8, 2048))
BACKENDS = ("FLASH_ATTENTION", "CUDNN_ATTENTION")


def cases(context: Context) -> list[Case]:
    decodes, prompts = context.pick((DECODES, PROMPTS), (((2, 40),), ((1, 32),)))
    shapes = [(n, 1, c) for n, c in decodes] + [(n, c, c) for n, c in prompts]
    backends = context.pick(BACKENDS, ("MATH",))
    return [
        Case(name, functools.partial(attention, context, shape, backend))
        for shape in shapes
        for backend in backends
        for name in [
            f"torch: {shape[0]} x {shape[2]} {'decode' if shape[1] == 1 else 'prompt'}, {backend}"
        ]
    ] + [Case("torch: matmul", lambda: matmul(context))]


def torch_here(context: Context) -> Any:
    """The module and its device. Raises `NotAvailable`."""
    try:
        import torch
    except ImportError as error:
        raise NotAvailable("PyTorch is not installed") from error
    if torch.cuda.is_available():
        return torch, "cuda"
    if not context.dry:
        raise NotAvailable("PyTorch sees no GPU")
    return torch, "cpu"


def attention(context: Context, shape: tuple[int, int, int], backend: str) -> dict[str, Any]:
    torch, device = torch_here(context)
    from torch.nn.attention import SDPBackend, sdpa_kernel

    requests, query, tokens = shape
    heads = context.pick(LLAMA_8B, Heads(2, 2, 32))
    rows = [(tokens, query)] * requests
    moved = attention_bytes(heads, rows)
    sets = max(1, min(8, -(-4 * L2_BYTES // moved))) if query == 1 else 1

    def array(length: int, count: int) -> Any:
        size = (requests, count, length, heads.size)
        return torch.randn(size, dtype=torch.bfloat16, device=device)

    inputs = [
        (array(query, heads.queries), array(tokens, heads.kv), array(tokens, heads.kv))
        for _ in range(sets)
    ]

    def run(i: int) -> Any:
        q, k, v = inputs[i % sets]
        with sdpa_kernel(getattr(SDPBackend, backend)):
            return torch.nn.functional.scaled_dot_product_attention(
                q, k, v, is_causal=query > 1, enable_gqa=True
            )

    seconds = time_on(torch, device, run, context.dry)
    if query == 1:
        floor, of = moved / context.bandwidth, "copy bandwidth"
    else:
        floor, of = attention_flops(heads, rows) / context.matmul, "matmul peak"
    return {"seconds": seconds, "floor_seconds": floor, "fraction": floor / seconds, "of": of}


def matmul(context: Context) -> dict[str, Any]:
    """PyTorch's own rate, beside the one that JAX reached."""
    torch, device = torch_here(context)
    size = context.pick(8192, 64)
    a, b = (torch.randn((size, size), dtype=torch.bfloat16, device=device) for _ in range(2))
    seconds = time_on(torch, device, lambda i: a @ b, context.dry)
    floor = 2 * size**3 / context.matmul
    return {
        "seconds": seconds,
        "flops_per_second": 2 * size**3 / seconds,
        "fraction": floor / seconds,
        "of": "matmul peak",
    }


def time_on(torch: Any, device: str, run: Callable[[int], Any], dry: bool) -> float:
    """Seconds of one call: launched back to back between two events of the device, the median of five repetitions."""
    if device == "cpu":
        begin = time.perf_counter()
        run(0)
        return time.perf_counter() - begin
    begin = time.perf_counter()
    while time.perf_counter() - begin < 0.1:
        run(0)
        torch.cuda.synchronize()
    times = []
    for _ in range(5):
        count, events = 20, [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        events[0].record()
        for i in range(count):
            run(i)
        events[1].record()
        torch.cuda.synchronize()
        times.append(events[0].elapsed_time(events[1]) / 1e3 / count)
    return statistics.median(times)
