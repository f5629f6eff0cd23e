"""What serving costs: streamed tokens per second of `jaxinfer serve`, beside vLLM's server or the engine offline.

    python benchmarks/serving_path.py --vllm VENV/bin/python
    python benchmarks/serving_path.py --offline --model smollm2-135m --streams 32

By default the model is a two-layer one of width 64, so that little but the serving path is measured. All servers are
warm and idle before the first round, then take turns, in an order that alternates; only one computes at a time. Given
are medians over the rounds, and of the per-round ratios (above 1: the server of jaxinfer is faster).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from machine import CoreMeter, describe_machine, versions, wait_until_quiet
from peers.launch import Worker, WorkerError, start_worker, vllm_preload
from serving.checks import completion, faults, percentile, random_prompt
from serving.http_client import COMPLETIONS, Address, ask
from serving.server import Server, ServerError, jaxinfer_command, running_server
from serving.tiny_model import write_tiny_model

VLLM_ENVIRONMENT = {
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
}
MAX_LEN = 1024


@dataclass(frozen=True)
class Run:
    """One round of one engine. Latencies in milliseconds, none of an engine that answers at the end."""

    tokens_per_s: float
    ttft_ms: float | None
    p99_itl_ms: float | None
    events_per_token: float | None
    cpu_us_per_token: float
    other_cores: float


@dataclass(frozen=True)
class Target:
    """`pid` of the process that, with its children, does the work."""

    name: str
    pid: int
    run: Callable[[list[list[int]], int], tuple[float, float | None, float | None, float | None]]


def over_http(address: Address, model: str | None):
    """All prompts at once, each a stream; wall seconds, median TTFT, p99 ITL, and events per token."""

    async def drive(prompts: list[list[int]], max_tokens: int):
        fields = {} if model is None else {"model": model}
        bodies = [completion(prompt, max_tokens, **fields) for prompt in prompts]
        start = time.perf_counter()
        calls = await asyncio.gather(*(ask(address, COMPLETIONS, body) for body in bodies))
        wall = time.perf_counter() - start
        answers = [call.answer for call in calls]
        for answer, body in zip(answers, bodies, strict=True):
            if found := faults(answer, body):
                raise ServerError("; ".join(found))
        ttft = statistics.median(call.times[0] - call.start for call in calls)
        gaps = [later - earlier for call in calls for earlier, later in pairwise(call.times)]
        events = sum(len(answer.events()) for answer in answers)
        return wall, 1e3 * ttft, 1e3 * percentile(gaps, 0.99), events / (len(prompts) * max_tokens)

    return lambda prompts, max_tokens: asyncio.run(drive(prompts, max_tokens))


def offline(worker: Worker):
    def run(prompts: list[list[int]], max_tokens: int):
        worker.reset()
        return worker.generate(prompts, max_tokens)["wall_s"], None, None, None

    return run


def measure(target: Target, prompts: list[list[int]], max_tokens: int, patience: float) -> Run:
    wait_until_quiet(patience_s=patience)
    with CoreMeter(target.pid) as meter:
        started = time.perf_counter()
        wall, ttft, itl, events = target.run(prompts, max_tokens)
        metered = time.perf_counter() - started
    count = len(prompts) * max_tokens
    return Run(
        count / wall, ttft, itl, events, 1e6 * meter.own * metered / count, max(0.0, meter.other)
    )


def vllm_server(python: Path, model: str, flags: list[str], threads: int, folder: Path):
    # What `vllm serve` runs; that command itself looks for a package named vllm, which vllm-cpu is not.
    command = [str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", model]
    command += ["--served-model-name", "tiny"]
    command += ["--max-model-len", str(MAX_LEN), "--dtype", "float32"]
    command += ["--disable-uvicorn-access-log", *flags]
    environment = VLLM_ENVIRONMENT | {
        "LD_PRELOAD": vllm_preload(python),
        "OMP_NUM_THREADS": str(threads),
        "PYTHONPATH": "",
        # Its ahead-of-time cache of an earlier start fails to load.
        "VLLM_CACHE_ROOT": str(folder / "vllm-cache"),
    }
    return running_server(command, folder / "vllm.log", environment)


def our_server(args: argparse.Namespace, model: str, folder: Path):
    flags = ["--max-model-len", str(MAX_LEN), "--max-num-seqs", str(args.streams)]
    flags += ["--dtype", args.dtype, "--warmup", "all", *args.serve_args]
    return running_server(jaxinfer_command(model, *flags), folder / "jaxinfer.log")


def table(runs: dict[str, list[Run]]) -> list[str]:
    """Markdown."""
    lines = [
        "| engine | tokens/s | TTFT ms | p99 ITL ms | events per token | CPU µs per token | jaxinfer against it | others' cores |",
        "|---|---|---|---|---|---|---|---|",
    ]
    ours = runs["jaxinfer serve"]
    for name, mine in runs.items():

        def median(field: str, form: str, mine: list[Run] = mine) -> str:
            values = [getattr(run, field) for run in mine]
            return "" if values[0] is None else format(statistics.median(values), form)

        ratios = [a.tokens_per_s / b.tokens_per_s for a, b in zip(ours, mine, strict=True)]
        ratio = "" if mine is ours else f"{statistics.median(ratios):.2f}"
        lines.append(
            f"| {name} | {median('tokens_per_s', '.0f')} | {median('ttft_ms', '.1f')} | "
            f"{median('p99_itl_ms', '.1f')} | {median('events_per_token', '.2f')} | "
            f"{median('cpu_us_per_token', '.0f')} | {ratio} | {median('other_cores', '.2f')} |"
        )
    return lines


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--model", help="id, folder or file (default: the tiny model)")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--streams", type=int, default=64, help="requests, all at once")
    parser.add_argument("--tokens", type=int, default=128, help="per stream")
    parser.add_argument("--prompt-tokens", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument(
        "--patience", type=float, default=20, help="seconds to wait for a quiet CPU"
    )
    parser.add_argument(
        "--vllm", type=Path, metavar="PYTHON", help="of an environment with vllm-cpu"
    )
    parser.add_argument("--vllm-threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument(
        "--vllm-args", nargs="+", default=[], metavar="FLAG", help="quoted: ' --flag'"
    )
    parser.add_argument(
        "--offline", action="store_true", help="the engine in one process, as a peer"
    )
    parser.add_argument(
        "--serve-args", nargs=argparse.REMAINDER, default=[], help="the rest goes to jaxinfer serve"
    )
    args = parser.parse_args()
    if args.vllm and args.model:
        parser.error("--vllm is measured with the tiny model")
    return args


def start_all(args: argparse.Namespace, folder: Path, stack: contextlib.ExitStack) -> list[Target]:
    model = args.model or str(write_tiny_model(folder / "tiny"))
    server: Server = stack.enter_context(our_server(args, model, folder))
    targets = [Target("jaxinfer serve", server.process.pid, over_http(server.address, None))]
    if args.vllm:
        flags = [flag.strip() for flag in args.vllm_args]
        peer = stack.enter_context(vllm_server(args.vllm, model, flags, args.vllm_threads, folder))
        targets.append(Target("vllm serve", peer.process.pid, over_http(peer.address, "tiny")))
    if args.offline:
        arguments = ["--model", model, "--dtype", args.dtype, "--vocab-size", "0"]
        arguments += ["--max-model-len", str(MAX_LEN)]
        worker = start_worker("jaxinfer", None, arguments, len(os.sched_getaffinity(0)))
        stack.callback(worker.close)
        targets.append(Target("jaxinfer offline", worker.process.pid, offline(worker)))
    return targets


def main() -> int:
    args = parse_args()
    rng = random.Random(0)
    runs: dict[str, list[Run]] = {}
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="serving-path-")))
        try:
            targets = start_all(args, folder, stack)
            for turn in range(args.rounds + 1):
                prompts = [random_prompt(rng, args.prompt_tokens) for _ in range(args.streams)]
                for target in targets if turn % 2 else targets[::-1]:
                    run = measure(target, prompts, args.tokens, args.patience)
                    if turn:  # the first round warms up
                        runs.setdefault(target.name, []).append(run)
                    print(f"round {turn} {target.name}: {run}", file=sys.stderr, flush=True)
        except (ServerError, WorkerError) as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
    print(
        f"{describe_machine()}; {versions('jax', 'uvicorn')}; {Path(args.model or 'the tiny model').name}, "
        f"{args.streams} streams of {args.tokens} tokens, {args.rounds} rounds\n"
    )
    print("\n".join(table({name: runs[name] for name in (t.name for t in targets)})))
    return 0


if __name__ == "__main__":
    sys.exit(main())
