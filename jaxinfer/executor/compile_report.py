"""`python -m jaxinfer.executor.compile_report`: what a GPU would have to do for a step, said without a GPU.

Compiles the engine's programs for a target such as the H200, each in a process of its own, and prints compile times,
memory, and bytes, FLOPs and kernels counted from the optimised HLO, against what no implementation can do without.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from jaxinfer.executor.compile_presets import PRESETS
from jaxinfer.executor.compile_workload import PROGRAMS, Workload
from kernels_pallas.compile_job import JobError, run_job
from kernels_pallas.gpu_target import TARGETS, get_target, missing_compiler

_TENSOR_PARALLEL = {"llama-70b": 4, "mixtral-8x7b": 2, "deepseek-v3": 8}
"""Devices of the presets that don't fit on one."""

_COLUMNS = (
    "program", "trace + lower", "compile", "arguments", "donated", "temporaries", "GB moved", "÷ floor",
    "GFLOP", "÷ floor", "roofline", "floor", "kernels", "a layer", "copies of weights or cache",
)  # fmt: skip

_MOSAIC_COLUMNS = (
    "kernel", "in", "registers", "spilled bytes", "shared memory", "blocks per SM", "wgmma", "TMA in", "TMA out",
)  # fmt: skip

_NOTES = """\
How to read it:

- *arguments, donated, temporaries*: from XLA's `memory_analysis()`, for one device. The forward programs donate the whole KV
  cache; a step that copied any of it would show here.
- *GB moved, GFLOP, kernels*: counted from the optimised HLO: operands and results of every kernel once, fused operations
  not at all, gathers by what they take, updates in place by what they write. What the L2 cache would serve is counted
  in full. Loops whose length depends on the batch are counted as one round (≥), and of conditionals every branch.
- *floor*: weights read once (of the embedding only the batch's rows), keys and values of every request read once and the
  new ones written, and their FLOPs; nothing of activations.
- *roofline*: the sum over kernels of bytes ÷ bandwidth or FLOPs ÷ peak, whichever is longer; launches, the host and the
  links between devices cost nothing here. *floor* beside it: the same of the floor's totals.
- *kernels a layer*: from the first kernel that reads a weight of one layer to the first of the next.
- No kernel spills: XLA's own are refused if they do, the library's are listed below the table, with their instructions.
- The library's kernels get slices of the step's packed integers where they lie, aligned as Mosaic GPU asks (256 bytes).
- XLA tunes no matmul without a device: on a GPU other kernels may be picked.
"""


@dataclass(frozen=True)
class Section:
    """One model's programs: what was measured of each, or why it couldn't be."""

    model: str
    tensor_parallel_size: int
    results: dict[str, dict[str, Any] | str]


def main(argv: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    if (reason := missing_compiler()) is not None:
        print(f"compile_report: {reason}.", file=sys.stderr)
        return 1
    work = Workload(args.rows, args.context, args.mixed_tokens, args.page_size)
    sections = []
    for model in args.model or PRESETS:
        size = args.tensor_parallel_size or _TENSOR_PARALLEL.get(model, 1)
        results = {program: _run(model, size, program, work, args) for program in args.programs}
        sections.append(Section(model, size, results))
        print(render_section(sections[-1], work), flush=True)
    if args.output is not None:
        options = shlex.join(sys.argv[1:] if argv is None else argv)
        args.output.write_text(render(sections, args.target, work, options))
    results = [result for section in sections for result in section.results.values()]
    return int(any(isinstance(result, str) or result["problems"] for result in results))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m jaxinfer.executor.compile_report",
        description="Compile the engine's programs for a GPU that is not here, and count what they do.",
    )
    workload = Workload()
    add = parser.add_argument
    add("--model", nargs="+", metavar="MODEL",
        help=f"presets ({', '.join(PRESETS)}), directories or ids; default: all presets")  # fmt: skip
    add("--target", default="h200", choices=sorted(TARGETS))
    add("--tensor-parallel-size", type=int, help="default: as many as it takes to hold it")
    add("--programs", nargs="+", default=PROGRAMS, choices=PROGRAMS)
    add("--rows", type=int, default=workload.rows, help="requests in the step")
    add("--context", type=int, default=workload.context, help="tokens of each request")
    add("--mixed-tokens", type=int, default=workload.mixed_tokens,
        help="tokens of the mixed step: one of each request but the last, whose chunk is the rest")  # fmt: skip
    add("--page-size", type=int, default=workload.page_size)
    add("--num-layers", type=int, help="cut the models short")
    add(
        "--kv-dtype",
        choices=("bfloat16", "float16", "float8_e4m3fn", "int8"),
        help="of the KV cache; default: the model's",
    )
    add("--time-limit", type=float, default=300, help="seconds for one program")
    add("--output", type=Path, help="write the report here, as Markdown")
    return parser


def _run(
    model: str, size: int, program: str, work: Workload, args: argparse.Namespace
) -> dict[str, Any] | str:
    arguments = {
        "model": model,
        "target": args.target,
        "tensor_parallel_size": size,
        "workload": asdict(work),
        "programs": [program],
        "num_layers": args.num_layers,
        "kv_dtype": args.kv_dtype,
    }
    try:
        (result,) = run_job(
            "jaxinfer.executor.compile_measure:measure", arguments, timeout=args.time_limit
        )
    except JobError as error:
        return str(error)
    return result


def render(sections: Sequence[Section], target: str, work: Workload, options: str = "") -> str:
    """The whole report in Markdown; `options` is what the command was given."""
    command = f"python -m jaxinfer.executor.compile_report {options}".strip()
    gpu = get_target(target)
    head = f"""# The engine's programs, compiled for the {gpu.device_name}

Written by `{command}` with JAX {version("jax")}, on a machine without a GPU.
{gpu.device_name}: {gpu.bytes_per_second / 1e12:g} TB/s, {gpu.bf16_flops_per_second / 1e12:g} TFLOP/s in bfloat16.

{_NOTES}"""
    return "\n".join([head, *(render_section(section, work) for section in sections)])


def render_section(section: Section, work: Workload) -> str:
    devices = section.tensor_parallel_size
    on = "one device" if devices == 1 else f"each of {devices} devices"
    lines = [
        f"## {section.model}, {on}",
        "",
        f"{work.rows} requests of {work.context} tokens, pages of {work.page_size}; the mixed step has "
        f"{work.mixed_tokens} tokens, {work.rows - 1} of them decodes.",
        "",
    ]
    measured = {k: r for k, r in section.results.items() if not isinstance(r, str)}
    lines += _table(_COLUMNS, [_row(result) for result in measured.values()])
    for program, problem in section.results.items():
        if isinstance(problem, str):
            lines += ["", f"**{program} failed:**", "", "```", problem, "```"]
    for program, result in measured.items():
        if result["moved"]:
            lines += ["", f"Copies in {program}:", ""]
            lines += [
                f"- {m['label']}: {_mib(m['num_bytes'])} by {m['kernel']} ({m['source']})"
                for m in result["moved"]
            ]
    for program, result in measured.items():
        if result["problems"]:
            lines += ["", f"**Wrong in {program}:**", ""]
            lines += [f"- {problem}" for problem in result["problems"]]
    lines += _mosaic_table(measured)
    if (decode := measured.get("decode")) and decode["layer"]:
        lines += ["", f"Kernels of one layer of {section.model}'s decode step:", ""]
        lines += _table(("kernel", "from", "reads", "MB moved", "GFLOP"), _layer_rows(decode))
    return "\n".join([*lines, ""])


def _row(r: dict[str, Any]) -> list[str]:
    memory, floor = r["memory"], r["floor"]
    least = "≥ " if r["num_open_loops"] else ""
    copied = sum(m["num_bytes"] for m in r["moved"])
    per_layer = r["kernels_per_layer"]
    return [
        r["program"],
        f"{r['lower_seconds']:.1f} s",
        f"{r['compile_seconds']:.1f} s",
        _mib(memory["arguments"]),
        _mib(memory["alias"]),
        _mib(memory["temporaries"]),
        f"{least}{r['num_bytes'] / 1e9:.2f}",
        f"{least}{r['num_bytes'] / floor['num_bytes']:.2f}",
        f"{least}{r['flops'] / 1e9:,.0f}",
        f"{least}{r['flops'] / floor['flops']:.2f}",
        f"{least}{r['roofline_seconds'] * 1e3:.2f} ms",
        f"{r['floor_seconds'] * 1e3:.2f} ms",
        f"{least}{r['num_kernels']}",
        "" if per_layer is None else f"{least}{per_layer:g}",
        f"{len(r['moved'])}, {_mib(copied)}" if r["moved"] else "none",
    ]


def _layer_rows(result: dict[str, Any]) -> list[list[str]]:
    return [
        [
            kernel["name"],
            kernel["source"],
            ", ".join(name.removeprefix("layers.") for name in kernel["inputs"]),
            f"{kernel['num_bytes'] / 1e6:.2f}",
            f"{kernel['flops'] / 1e9:.2f}" if kernel["flops"] else "",
        ]
        for kernel in result["layer"]
    ]


def _mosaic_table(measured: dict[str, dict[str, Any]]) -> list[str]:
    rows = [
        [
            kernel["name"],
            program,
            str(kernel["registers"]),
            str(kernel["spilled_bytes"]),
            f"{kernel['shared_memory'] / 1024:.1f} KiB",
            str(kernel["blocks_per_core"]),
            str(kernel["matmuls"] or ""),
            str(kernel["loads"] or ""),
            str(kernel["stores"] or ""),
        ]
        for program, result in measured.items()
        for kernel in result["mosaic_kernels"]
    ]
    return ["", "The library's own kernels:", "", *_table(_MOSAIC_COLUMNS, rows)] if rows else []


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(cells)} |" for cells in (columns, ["---"] * len(columns), *rows)]


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:,.1f} MiB"


if __name__ == "__main__":
    sys.exit(main())
