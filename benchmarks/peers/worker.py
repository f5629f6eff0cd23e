"""The worker side of a benchmark: one engine in one process, driven over stdin and stdout by JSON lines.

The driver sends `{"op": "generate", "prompts": [[ids]], "max_tokens": n}` and gets `{"wall_s", "outputs", "counters"}`;
before each timed call it sends `{"op": "reset"}`, which empties whatever the engine remembers of earlier prompts.
Standard library only: every peer's environment can import this.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

Prompts = list[list[int]]


@dataclass(frozen=True)
class Engine:
    """`generate(prompts, max_tokens)` is greedy, ignores end-of-sequence and returns the output ids in order."""

    version: str
    generate: Callable[[Prompts, int], Prompts]
    settings: str = ""
    reset: Callable[[], object] = lambda: None
    counters: Callable[[], Mapping[str, int]] = dict


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True, help="Hugging Face directory")
    parser.add_argument("--gguf", help="dense GGUF file, for engines that read nothing else")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--max-model-len", type=int, default=1024)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--warmup", default="all", help="jaxinfer's policy: all or lazy")
    parser.add_argument("--vocab-size", type=int, required=True)
    return parser.parse_args()


def _seconds_since_process_start() -> float:
    with open("/proc/self/stat") as file:
        started = int(file.read().rsplit(")", 1)[1].split()[19]) / os.sysconf("SC_CLK_TCK")
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started


def serve(build: Callable[[argparse.Namespace], Engine]) -> None:
    """Build the engine, generate one token, say ready, then answer until stdin ends."""
    # Engines print to stdout now and then: it becomes stderr, and the protocol keeps a private copy.
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    sys.stdout = sys.stderr

    def reply(**message: object) -> None:
        replies.write(json.dumps(message) + "\n")

    args = parse_args()
    engine = build(args)
    engine.generate([list(range(300, 332))], 1)
    reply(
        version=engine.version, settings=engine.settings, startup_s=_seconds_since_process_start()
    )
    for line in sys.stdin:
        request = json.loads(line)
        if request["op"] == "reset":
            engine.reset()
            reply()
            continue
        start = time.perf_counter()
        outputs = engine.generate(request["prompts"], request["max_tokens"])
        wall = time.perf_counter() - start
        reply(wall_s=wall, outputs=outputs, counters=dict(engine.counters()))
