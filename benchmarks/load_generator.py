"""A load generator of somebody else's, inference-perf, against `jaxinfer serve`: both sides must count and time alike.

    python -m venv venv-perf && venv-perf/bin/pip install inference-perf
    python benchmarks/load_generator.py --tool venv-perf/bin/inference-perf --model HF_DIR

Requests, prompt tokens and output tokens of the tool's report and of `/metrics` are compared, the mean time to the first
token, and the throughput, which on the server's side is read from `/metrics` while the tool runs. The run fails when one
of them differs by more than 5 %, or a request fails.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from machine import describe_machine, versions
from serving.checks import until_idle
from serving.http_client import Address, read_metrics
from serving.server import ServerError, jaxinfer_command, running_server

TOLERANCE = 0.05
POLL_SECONDS = 0.1


@dataclass
class Window:
    """When the server's count of tokens was first and last seen to change, and what it was before and after."""

    start: float = 0.0
    end: float = 0.0
    first: float = 0.0
    last: float = 0.0

    def see(self, tokens: float) -> None:
        now = time.monotonic()
        if self.start == 0.0 or tokens == self.first:
            self.start, self.end, self.first, self.last = now, now, tokens, tokens
        elif tokens != self.last:
            self.end, self.last = now, tokens

    @property
    def rate(self) -> float:
        return (self.last - self.first) / (self.end - self.start)


def tool_settings(args: argparse.Namespace, url: str, folder: Path) -> dict[str, Any]:
    """inference-perf's configuration: random prompts, a fixed number of requests at once, streamed completions."""

    def lengths(mean: int) -> dict[str, Any]:
        spread = mean // 4
        return {
            "type": "normal",
            "min": mean // 2,
            "max": 2 * mean,
            "mean": mean,
            "std_dev": spread,
        }

    return {
        "api": {"type": "completion", "streaming": True},
        "data": {
            "type": "random",
            "input_distribution": lengths(args.input_len),
            "output_distribution": lengths(args.output_len),
        },
        "load": {
            "type": "concurrent",
            "num_workers": 1,
            "stages": [{"num_requests": args.requests, "concurrency_level": args.concurrency}],
        },
        "server": {"type": "vllm", "model_name": args.model, "base_url": url, "ignore_eos": True},
        "tokenizer": {"pretrained_model_name_or_path": args.model},
        "report": {"request_lifecycle": {"per_stage": False, "use_server_output_tokens": True}},
        "storage": {"local_storage": {"path": str(folder / "reports")}},
    }


async def run_tool(
    args: argparse.Namespace, address: Address, folder: Path
) -> tuple[dict[str, Any], Window]:
    """The tool's summary, and what the server counted meanwhile. Raises `ServerError` when the tool fails."""
    settings = tool_settings(args, f"http://{address.host}:{address.port}", folder)
    config = folder / "inference-perf.yml"
    config.write_text(json.dumps(settings))
    log = folder / "inference-perf.log"
    window = Window()
    window.see((await read_metrics(address))["generation_tokens_total"])
    with log.open("wb") as output:
        process = subprocess.Popen(
            [args.tool, "--config_file", str(config)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env={**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": ""},
        )
        try:
            while process.poll() is None:
                window.see((await read_metrics(address))["generation_tokens_total"])
                await asyncio.sleep(POLL_SECONDS)
        finally:
            process.kill()
    found = list((folder / "reports").rglob("summary_lifecycle_metrics.json"))
    if process.returncode or not found:
        raise ServerError(f"inference-perf failed:\n{log.read_text(errors='replace')[-2000:]}")
    return json.loads(found[0].read_text()), window


async def compare(
    args: argparse.Namespace, address: Address, folder: Path
) -> list[tuple[str, float, float]]:
    """By what is measured: the tool's figure and the server's."""
    before = await read_metrics(address)
    summary, window = await run_tool(args, address, folder)
    after, _ = await until_idle(address)
    good = summary["successes"]

    def grown(name: str) -> float:
        return after[name] - before[name]

    def server_ttft() -> float:
        name = "time_to_first_token_seconds"
        return grown(f"{name}_sum") / grown(f"{name}_count")

    ended = sum(grown(name) for name in after if name.startswith("request_success_total"))
    ttft = good["latency"]["time_to_first_token"]["mean"]
    return [
        ("requests", good["count"], ended),
        ("failed requests", summary["failures"]["count"], grown("request_success_total.error")),
        ("prompt tokens", good["prompt_tokens"]["total"], grown("prompt_tokens_total")),
        ("output tokens", good["output_tokens"]["total"], grown("generation_tokens_total")),
        ("mean TTFT, ms", 1e3 * ttft, 1e3 * server_ttft()),
        ("output tokens/s", good["throughput"]["output_tokens_per_sec"], window.rate),
    ]


def table(
    figures: list[tuple[str, float, float]], agrees: Callable[[float, float], bool]
) -> list[str]:
    """Markdown."""
    lines = ["| | inference-perf | /metrics | difference | |", "|---|---|---|---|---|"]
    for name, theirs, ours in figures:
        difference = f"{theirs / ours - 1:+.1%}" if ours else ""
        mark = "" if agrees(theirs, ours) else "MISSED"
        lines.append(f"| {name} | {theirs:.5g} | {ours:.5g} | {difference} | {mark} |")
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--tool", required=True, help="the program inference-perf")
    parser.add_argument("--model", required=True, help="a Hugging Face directory")
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--input-len", type=int, default=64, help="tokens, on average")
    parser.add_argument("--output-len", type=int, default=32, help="tokens, on average")
    parser.add_argument(
        "--serve-args", nargs=argparse.REMAINDER, default=[], help="the rest goes to jaxinfer serve"
    )
    args = parser.parse_args()
    flags = ["--max-num-seqs", str(args.concurrency), "--max-model-len", "1024", "--warmup", "all"]
    flags += args.serve_args
    with tempfile.TemporaryDirectory(prefix="load-generator-") as name:
        folder = Path(name)
        command = jaxinfer_command(args.model, *flags)
        try:
            with running_server(command, folder / "server.log") as server:
                figures = asyncio.run(compare(args, server.address, folder))
        except ServerError as error:
            print(f"error: {error}", file=sys.stderr)
            return 1

    def agrees(theirs: float, ours: float) -> bool:
        return abs(theirs - ours) <= TOLERANCE * abs(ours)

    print(
        f"{describe_machine()}; {versions('jax', 'uvicorn')}; {Path(args.model).name}, "
        f"{args.concurrency} requests at once\n"
    )
    print("\n".join(table(figures, agrees)))
    return (
        0 if all(agrees(theirs, ours) for _, theirs, ours in figures) and not figures[1][1] else 1
    )


if __name__ == "__main__":
    sys.exit(main())
