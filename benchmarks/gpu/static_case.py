"""What can be said of each target without a GPU, from compiling for one; writes that part of docs/gpu_results.md.

python benchmarks/gpu/static_case.py [--output docs/gpu_results.md]
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY))

from benchmarks.gpu import report, static_kernels  # noqa: E402
from kernels_pallas.compile_job import JobError, run_job  # noqa: E402
from kernels_pallas.gpu_target import GpuTarget, get_target, missing_compiler  # noqa: E402

LATENCY = 1e-6
"""Seconds from a load to its data with memory under load: an assumption, on the long side."""
STEPS = ((128, 1500), (256, 1500))
"""(requests, context) of the engine's decode steps."""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--target", default="h200")
    parser.add_argument("--output", type=Path, metavar="PAGE")
    args = parser.parse_args(argv)
    if (reason := missing_compiler()) is not None:
        print(f"static_case: {reason}.", file=sys.stderr)
        return 1
    kernels = {call: measure_call(call, args.target) for call in static_kernels.CALLS}
    steps = {step: measure_step(*step, args.target) for step in STEPS}
    text = render(kernels, steps, get_target(args.target))
    if args.output is None:
        print(text)
    else:
        report.put_between(args.output, report.STATIC, text)
    problems = [r for r in (*kernels.values(), *steps.values()) if isinstance(r, str)]
    print(*problems, sep="\n", file=sys.stderr)
    return int(bool(problems))


def measure_call(call: str, target: str) -> dict[str, Any] | str:
    """What `static_kernels.measure` says, or what went wrong."""
    with tempfile.TemporaryDirectory(prefix="ptx-") as folder:
        try:
            return run_job(
                "benchmarks.gpu.static_kernels:measure",
                {"call": call, "target": target},
                timeout=300,
                env={
                    **static_kernels.DUMP,
                    "MOSAIC_GPU_DUMP_TO": folder,
                    "JAX_ENABLE_COMPILATION_CACHE": "false",
                },
                python_path=[str(REPOSITORY)],
            )
        except JobError as error:
            return str(error)


def measure_step(requests: int, context: int, target: str) -> list[dict[str, Any]] | str:
    """The 8B model's decode step and its sampling, counted from their optimised HLO."""
    work = {"rows": requests, "context": context, "page_size": 64, "mixed_tokens": 1024}
    arguments = {
        "model": "llama-8b",
        "target": target,
        "tensor_parallel_size": 1,
        "workload": work,
        "programs": ["decode", "sample_greedy"],
    }
    try:
        return run_job("jaxinfer.executor.compile_measure:measure", arguments, timeout=300)
    except JobError as error:
        return str(error)


def render(
    kernels: dict[str, dict[str, Any] | str],
    steps: dict[tuple[int, int], list[dict[str, Any]] | str],
    gpu: GpuTarget,
) -> str:
    needed = gpu.bytes_per_second * LATENCY / gpu.num_cores
    lines = [
        f"Compiled for the {gpu.device_name} with JAX {version('jax')} by `python "
        f"benchmarks/gpu/static_case.py`; floors from its data sheet ({gpu.bytes_per_second / 1e12:g} TB/s, "
        f"{gpu.bf16_flops_per_second / 1e12:g} TFLOP/s), of which a copy and a matrix product reach about 90 and 80 %.",
        "",
        "### Attention kernels",
        "",
        "32 query heads, 8 kv heads of size 128, bfloat16, pages of 64 tokens. *In flight* is the shared memory of all "
        "blocks that fit on a core: the ring of keys and values is nearly all of it. To keep memory busy, a core "
        f"needs about {needed / 1024:.0f} KiB in flight (bandwidth x {LATENCY * 1e6:g} µs / {gpu.num_cores} cores).",
        "",
        "| call | floor | MB | GFLOP | kernel | registers | spills | threads | blocks a core | in flight | wgmma | TMA loads |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for call, result in kernels.items():
        lines += _kernel_rows(call, result)
    lines += [
        "",
        "### The engine's decode step, 8B llama",
        "",
        "*At best* is floor / roofline: the fraction that is left when every kernel runs at the data sheet's rates, by "
        "the bytes and FLOPs that the compiled program moves. Launches cost nothing in it, which is what GPU busy is "
        "about.",
        "",
        "| requests x context | floor | roofline | at best | kernels a layer | kernels | copies of weights or cache |",
        "|---|---|---|---|---|---|---|",
    ]
    lines += [_step_row(step, result) for step, result in steps.items()]
    return "\n".join(lines)


def _kernel_rows(call: str, result: dict[str, Any] | str) -> list[str]:
    if isinstance(result, str):
        reason = " ".join(result.split())
        return [f"| {call} | | | | {reason[:160]} | | | | | | | |"]
    rows = []
    head = (
        f"{result['floor_seconds'] * 1e6:.0f} µs",
        f"{result['num_bytes'] / 1e6:,.0f}",
        f"{result['flops'] / 1e9:,.0f}",
    )
    for kernel in result["kernels"]:
        in_flight = kernel["blocks_per_core"] * kernel["shared_memory"]
        cells = (
            kernel["name"],
            kernel["registers"],
            kernel["spilled_bytes"],
            kernel["threads"],
            kernel["blocks_per_core"],
            f"{in_flight / 1024:.0f} KiB" if kernel["loads"] else "",
            kernel["matmuls"],
            kernel["loads"],
        )
        rows.append(f"| {call} | {' | '.join(map(str, (*head, *cells)))} |")
        call, head = "", ("", "", "")
    return rows


def _step_row(step: tuple[int, int], result: list[dict[str, Any]] | str) -> str:
    name = f"{step[0]} x {step[1]}"
    if isinstance(result, str):
        return f"| {name} | | | | | | {' '.join(result.split())[:160]} |"
    decode, _ = result
    floor, roofline = (sum(r[k] for r in result) for k in ("floor_seconds", "roofline_seconds"))
    moved = sum(len(r["moved"]) for r in result)
    cells = (
        f"{floor * 1e3:.2f} ms",
        f"{roofline * 1e3:.2f} ms",
        f"{floor / roofline:.2f}",
        f"{decode['kernels_per_layer']:g}",
        sum(r["num_kernels"] for r in result),
        moved or "none",
    )
    return f"| {name} | {' | '.join(map(str, cells))} |"


if __name__ == "__main__":
    sys.exit(main())
