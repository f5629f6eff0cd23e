"""Offline throughput of jaxinfer and, where installed, its peers, interleaved in one run.

    python benchmarks/offline.py
    python benchmarks/offline.py --model HF_DIR --peer vllm=VENV/bin/python --peer llamacpp=VENV/bin/python --gguf FILE

Every engine is a process of its own that is loaded and warmed up first and then takes turns with the others: in each
round each engine runs each workload once, in an order that alternates, and only one of them computes at a time. Given
are medians over the rounds and, against each peer, the median of the per-round ratios (above 1: jaxinfer is faster).
The run fails when jaxinfer compiled anything after its warm-up.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from machine import CoreMeter, describe_machine, wait_until_quiet
from peers.launch import WORKERS, Worker, WorkerError, start_worker
from workload import NAMES, make_workload

WARMUP_SEED = 1000


@dataclass(frozen=True)
class Run:
    """One workload once. `ttft_s` is the time of a run that stops after its first token (W3 only)."""

    engine: str
    workload: str
    round: int
    wall_s: float
    ttft_s: float | None
    compilations: int
    own_cores: float
    other_cores: float
    first_tokens: list[int]


def metric_of(run: Run, output_tokens: int) -> float:
    """Output tokens per second, or for a single stream milliseconds per token after the first."""
    if run.ttft_s is None:
        return output_tokens / run.wall_s
    return 1e3 * (run.wall_s - run.ttft_s) / (output_tokens - 1)


def run_once(worker: Worker, name: str, vocab_size: int, seed: int, round_: int) -> Run:
    workload = make_workload(name, vocab_size, seed)
    ttft = None
    compilations = 0
    with CoreMeter(worker.process.pid) as cores:
        if name == "W3":
            worker.reset()
            first = worker.generate(workload.prompts, 1)
            ttft = first["wall_s"]
        worker.reset()
        answer = worker.generate(workload.prompts, workload.max_tokens)
        compilations = answer["counters"].get("compilations", 0)
    return Run(
        engine=worker.name,
        workload=name,
        round=round_,
        wall_s=answer["wall_s"],
        ttft_s=ttft,
        compilations=compilations,
        own_cores=cores.own,
        other_cores=cores.other,
        first_tokens=[output[0] for output in answer["outputs"]],
    )


def measure(workers: list[Worker], args: argparse.Namespace, vocab_size: int) -> list[Run]:
    """Warm up, then interleave. The compilation counts in the result are those since the warm-up."""
    compiled = {}
    for worker in workers:
        for name in args.workloads:
            warm = run_once(worker, name, vocab_size, args.seed + WARMUP_SEED, round_=-1)
            compiled[worker.name] = warm.compilations
    runs = []
    for round_ in range(args.rounds):
        order = workers if round_ % 2 == 0 else workers[::-1]
        for name in args.workloads:
            for worker in order:
                wait_until_quiet(patience_s=args.patience)
                run = run_once(worker, name, vocab_size, args.seed, round_)
                before, compiled[worker.name] = compiled[worker.name], run.compilations
                runs.append(replace(run, compilations=run.compilations - before))
                print(
                    f"round {round_} {name} {worker.name}: {run.wall_s:.2f} s "
                    f"(cores: own {run.own_cores:.2f}, others {run.other_cores:.2f})",
                    file=sys.stderr,
                    flush=True,
                )
    return runs


def table(runs: list[Run], names: list[str], vocab_size: int) -> list[str]:
    """Markdown: a row per engine and workload."""
    lines = [
        "| workload | engine | median | best | ttft ms | jaxinfer against it | first tokens equal | others' cores |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name in names:
        workload = make_workload(name, vocab_size)
        lower_is_better = name == "W3"
        unit = "ms/token" if lower_is_better else "tok/s"
        ours = {r.round: r for r in runs if r.workload == name and r.engine == "jaxinfer"}
        for engine in dict.fromkeys(r.engine for r in runs):
            mine = [r for r in runs if r.workload == name and r.engine == engine]
            count = workload.num_output_tokens
            values = [metric_of(r, count) for r in mine]
            best = min(values) if lower_is_better else max(values)
            ttfts = [1e3 * r.ttft_s for r in mine if r.ttft_s is not None]
            ratio = equal = ""
            if engine != "jaxinfer" and ours:
                pairs = [(metric_of(ours[r.round], count), metric_of(r, count)) for r in mine]
                ratios = [b / a if lower_is_better else a / b for a, b in pairs]
                ratio = f"{statistics.median(ratios):.2f}"
                same = [
                    a == b
                    for r in mine
                    for a, b in zip(ours[r.round].first_tokens, r.first_tokens, strict=True)
                ]
                equal = f"{sum(same) / len(same):.0%}"
            lines.append(
                f"| {name} | {engine} | {statistics.median(values):.1f} {unit} | {best:.1f} | "
                f"{f'{statistics.median(ttfts):.0f}' if ttfts else ''} | {ratio} | {equal} | "
                f"{statistics.median(r.other_cores for r in mine):.2f} |"
            )
    return lines


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument(
        "--model", default="smollm2-135m", help="Hugging Face directory or model id"
    )
    parser.add_argument("--gguf", help="GGUF file for llamacpp and openvino")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--workloads", default=",".join(NAMES), type=lambda text: text.split(","))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--vocab-size", type=int, help="default: config.json's")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--max-model-len", type=int, default=1024)
    parser.add_argument(
        "--warmup", default="all", choices=("all", "lazy"), help="jaxinfer's policy"
    )
    parser.add_argument(
        "--peer",
        action="append",
        default=[],
        metavar="NAME=PYTHON",
        help=f"one of {sorted(set(WORKERS) - {'jaxinfer'})} and the Python it is installed in",
    )
    parser.add_argument(
        "--patience", type=float, default=20, help="seconds to wait for a quiet CPU"
    )
    parser.add_argument("--json", type=Path, help="write every run here")
    args = parser.parse_args()
    for peer in args.peer:
        name, _, python = peer.partition("=")
        if name not in WORKERS or not python:
            parser.error(f"--peer wants NAME=PYTHON with a name of {sorted(WORKERS)}, got {peer!r}")
    if args.peer and not Path(args.model).is_dir():
        parser.error(
            "--model must be a Hugging Face directory when peers run (peers/make_hf_model.py)"
        )
    return args


def model_vocab_size(args: argparse.Namespace) -> int:
    if args.vocab_size:
        return args.vocab_size
    from jaxinfer.weights.resolve import open_checkpoint, resolve_model

    config = open_checkpoint(resolve_model(args.model)).config()
    return config.get("vocab_size") or config["text_config"]["vocab_size"]


def main() -> int:
    args = parse_args()
    vocab_size = model_vocab_size(args)
    arguments = ["--model", args.model, "--dtype", args.dtype, "--vocab-size", str(vocab_size)]
    arguments += ["--max-model-len", str(args.max_model_len), "--warmup", args.warmup]
    if args.gguf:
        arguments += ["--gguf", args.gguf]
    engines = [("jaxinfer", None), *(tuple(peer.split("=", 1)) for peer in args.peer)]
    workers: list[Worker] = []
    try:
        for name, python in engines:
            workers.append(start_worker(name, python, arguments, args.threads))
        runs = measure(workers, args, vocab_size)
    except WorkerError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    finally:
        for worker in workers:
            worker.close()

    print(f"{describe_machine()}; {Path(args.model).name}, {args.dtype}, {args.rounds} rounds\n")
    for worker in workers:
        print(
            f"- {worker.name} {worker.version} ({worker.settings}); start-up {worker.startup_s:.1f} s"
        )
    print("\n" + "\n".join(table(runs, args.workloads, vocab_size)))
    if args.json:
        args.json.write_text(json.dumps([asdict(run) for run in runs], indent=1))
    compiled = sum(run.compilations for run in runs)
    print(f"\nprograms compiled by jaxinfer after warm-up: {compiled}")
    return 1 if compiled else 0


if __name__ == "__main__":
    sys.exit(main())
