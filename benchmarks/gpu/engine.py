"""The engine end to end, offline, on an 8B llama with made-up weights: tokens per second beside the roofline.

1000 tokens in and 1000 out are cut short: prompts of 1000 tokens are timed, then decode steps at a context of 1500, the
middle of the output, as a step's time grows linearly with the context. 256 in and 256 out run whole, through
`LLM.generate`.
"""

from __future__ import annotations

import dataclasses
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.gpu.busy import measure_busy
from benchmarks.gpu.cases import Case, Context
from benchmarks.gpu.engine_parts import (
    Parts,
    compile_programs,
    start_engine,
)
from benchmarks.gpu.model_folder import llama_config, write_model_folder
from benchmarks.gpu.once import Once
from jaxinfer.engine.messages import EngineCoreRequest
from jaxinfer.sampling_params import SamplingParams


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Tokens of a request, and steps that are timed."""

    prompt: int
    middle: int
    """Context in the middle of the output."""
    output: int
    room: int
    """Tokens that a request may get beyond the middle."""
    short: int
    """Prompt and output of the requests that run whole."""
    steps: int
    traced: int
    block: int
    budget: int
    """Tokens of a step at most."""


REAL = Sizes(1000, 1500, 1000, room=300, short=256, steps=60, traced=20, block=64, budget=8192)
DRY = Sizes(20, 30, 20, room=20, short=8, steps=3, traced=2, block=8, budget=32)


def cases(context: Context) -> list[Case]:
    bench = Bench(context)
    order = bench.concurrency
    return [
        Case("start", bench.start, lambda: bench.parts, limit=100),
        *(Case(f"{n} x 1000 in, 1000 out", lambda n=n: bench.long(n), limit=60) for n in order),
        *(Case(f"{n} x 256 in, 256 out", lambda n=n: bench.short(n), limit=60) for n in order),
    ]


class Bench:
    """The engine, started by the first case that needs it."""

    def __init__(self, context: Context) -> None:
        self.context, self.sizes = context, context.pick(REAL, DRY)
        # Most worth first: 128 has a target.
        self.concurrency = context.pick((128, 32, 256, 1), (2,))
        self._once = Once()
        self._requests = 0
        self.start_seconds = 0.0

    @property
    def arguments(self) -> dict[str, Any]:
        """Of the engine. Its cache has room for just these requests."""
        sizes, most = self.sizes, max(self.concurrency)
        length = sizes.middle + sizes.room
        return {
            "load_format": "dummy",
            "max_model_len": length,
            "max_num_seqs": most,
            "max_num_batched_tokens": sizes.budget,
            "block_size": sizes.block,
            "num_gpu_blocks_override": 1 + most * -(-length // sizes.block),
        }

    @property
    def steps(self) -> list[tuple[int, int]]:
        """(tokens, rows) of the steps that are compiled at the start; the others are, when they first come."""
        sizes, most = self.sizes, max(self.concurrency)
        full = [(sizes.budget, rows) for rows in (sizes.budget // sizes.short, most)]
        return [*((n, n) for n in self.concurrency), *full, (sizes.prompt, 1), (sizes.short, 1)]

    @property
    def folder(self) -> Path:
        def write() -> tempfile.TemporaryDirectory[str]:
            folder = tempfile.TemporaryDirectory(prefix="llama-")
            write_model_folder(Path(folder.name), llama_config(self.context.dry))
            return folder

        return Path(self._once.get("folder", write).name)

    @property
    def parts(self) -> Parts:
        return self._once.get("engine", self._start)

    def _start(self) -> Parts:
        begin = time.perf_counter()
        parts = start_engine(str(self.folder), self.arguments)
        compile_programs(parts.executor.runner.programs, self.steps)
        self.start_seconds = time.perf_counter() - begin
        return parts

    def start(self) -> dict[str, Any]:
        parts = self.parts
        return {
            "seconds": self.start_seconds,
            "weight_bytes": parts.weight_bytes,
            "kv_blocks": parts.core.num_blocks,
        }

    # ---- 1000 in, 1000 out

    def long(self, requests: int) -> dict[str, Any]:
        sizes, parts = self.sizes, self.parts
        rng = np.random.default_rng(requests)
        prompts = rng.integers(3, parts.vocab_size, (requests, sizes.middle)).tolist()
        short = [prompt[: sizes.prompt] for prompt in prompts]
        prefill = self.without_compiling(lambda: self.prefill(short))
        ids = self.add(prompts, sizes.room)
        self.step_until_all_answered(ids)
        step = self.time_steps(sizes.steps, requests)
        device = parts.device_step_seconds(self.context.pick(20, 2))
        values = self.decode_values(requests, step, device)
        values |= self.busy_values(requests, step, device)
        parts.core.abort_requests(ids)
        self.drain()
        whole = prefill + sizes.output * step
        floor = parts.prefill_floor(requests * sizes.prompt, sizes.prompt, self.context)
        return {
            "seconds": step,
            **values,
            "prefill_tokens_per_second": requests * sizes.prompt / prefill,
            "prefill_fraction": floor / prefill,
            "output_tokens_per_second": requests * sizes.output / whole,
            "extrapolated": f"prefill + {sizes.output} steps at {sizes.middle} tokens of context",
        }

    def without_compiling(self, measure: Callable[[], float]) -> float:
        """Measures again, on an empty prefix cache, where something was compiled meanwhile: a step had an odd size."""
        executor = self.parts.executor
        executor.reset_num_compilations()
        seconds = measure()
        if executor.num_compilations:
            self.parts.core.reset_prefix_cache()
            seconds = measure()
        return seconds

    def add(self, prompts: list[list[int]], max_tokens: int) -> list[str]:
        ids = []
        for prompt in prompts:
            self._requests += 1
            ids.append(f"bench-{self._requests}")
            params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
            self.parts.core.add_request(
                EngineCoreRequest(ids[-1], prompt, params, arrival_time=time.monotonic())
            )
        return ids

    def drain(self) -> None:
        while self.parts.core.has_unfinished():
            self.parts.core.step()

    def prefill(self, prompts: list[list[int]]) -> float:
        """Seconds from the first request to the last one's first token."""
        begin = time.perf_counter()
        self.add(prompts, 1)
        self.drain()
        return time.perf_counter() - begin

    def step_until_all_answered(self, ids: list[str]) -> None:
        waiting = set(ids)
        while waiting:
            waiting.difference_update(self.parts.core.step().request_ids)
        for _ in range(3):
            self.parts.core.step()

    def time_steps(self, count: int, requests: int) -> float:
        begin = time.perf_counter()
        for _ in range(count):
            tokens = len(self.parts.core.step().token_ids)
            if tokens != requests:
                raise RuntimeError(f"a decode step brought {tokens} tokens of {requests} requests")
        return (time.perf_counter() - begin) / count

    def decode_values(self, requests: int, step: float, device: float) -> dict[str, Any]:
        floor = self.parts.decode_floor(requests, self.sizes.middle, self.context)
        return {
            "floor_seconds": floor,
            "fraction": floor / step,
            "of": "roofline",
            "decode_tokens_per_second": requests / step,
            "device_step_seconds": device,
            "device_fraction": floor / device,
        }

    def busy_values(self, requests: int, step: float, device: float) -> dict[str, Any]:
        """From a profile; where there is none, from the time of steps that are launched without reading their tokens."""
        values = {"busy_by_chained_steps": min(device / step, 1.0)}
        try:
            busy = measure_busy(lambda: self.time_steps(self.sizes.traced, requests))
        except Exception as error:
            return values | {
                "busy": values["busy_by_chained_steps"],
                "host_gap_seconds": max(step - device, 0.0),
                "note": f"no profile ({type(error).__name__}: {error})"[:200],
            }
        gap = (busy.span_seconds - busy.busy_seconds) / self.sizes.traced
        return values | {
            "busy": busy.fraction,
            "host_gap_seconds": gap,
            "kernels_per_step": round(busy.num_kernels / self.sizes.traced),
        }

    # ---- 256 in, 256 out

    def short(self, requests: int) -> dict[str, Any]:
        size, parts = self.sizes.short, self.parts
        rng = np.random.default_rng(1000 + requests)

        def generate(prompts: Any, max_tokens: int) -> float:
            params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
            begin = time.perf_counter()
            outputs = parts.llm.generate(prompts.tolist(), params, use_tqdm=False)
            seconds = time.perf_counter() - begin
            lengths = {len(output.outputs[0].token_ids) for output in outputs}
            if lengths != {max_tokens}:
                raise RuntimeError(f"outputs have {sorted(lengths)} tokens, not {max_tokens}")
            return seconds

        def prompts() -> Any:
            return rng.integers(3, parts.vocab_size, (requests, size))

        wall = self.without_compiling(lambda: generate(prompts(), size))
        floor = parts.prefill_floor(
            requests * size, size, self.context
        ) + size * parts.decode_floor(requests, size + size // 2, self.context)
        return {
            "seconds": wall,
            "floor_seconds": floor,
            "fraction": floor / wall,
            "of": "roofline",
            "output_tokens_per_second": requests * size / wall,
            "total_tokens_per_second": 2 * requests * size / wall,
        }
