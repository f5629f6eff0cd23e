"""A server under load, under abuse, and after accidents: what it promises, checked on a server of its own.

    python benchmarks/soak.py
    python benchmarks/soak.py --model smollm2-135m --only streams "killed core"

Streams that lose nothing and leave memory flat; clients that disconnect at random moments; clients that stop reading;
an engine core that is killed; a full queue; timeouts. Without `--model`, a tiny one is written first. Prints a table, and
ends with 1 when anything in it isn't as it should be.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

from machine import describe_machine, versions
from serving import failure_cases, load_cases
from serving.checks import BLOCK_SIZE, Check
from serving.server import Server, ServerError, jaxinfer_command, running_server
from serving.tiny_model import write_tiny_model

MAX_LEN, NUM_BLOCKS = 2048, 8192
LIMITS = ("--max-model-len", str(MAX_LEN), "--num-gpu-blocks-override", str(NUM_BLOCKS))
LIMITS += ("--block-size", str(BLOCK_SIZE), "--max-num-batched-tokens", "128", "--warmup", "all")
NUM_RUNNING, NUM_QUEUED = 8, 8
CASES = ("streams", "disconnects", "slow readers", "timeouts", "killed core", "full queue")

type Case = Callable[[Server], Awaitable[list[Check]]]


def groups(args: argparse.Namespace, rng: random.Random) -> dict[tuple[str, ...], dict[str, Case]]:
    """By the flags of the server that they share."""
    large = ("--max-num-seqs", "128")
    small = ("--max-num-seqs", str(NUM_RUNNING), "--max-num-queued-reqs", str(NUM_QUEUED))
    return {
        large: {
            "streams": lambda s: load_cases.streams(
                s, args.clients, args.requests, NUM_BLOCKS, MAX_LEN, rng
            ),
            "disconnects": lambda s: load_cases.disconnects(
                s, args.disconnects, NUM_BLOCKS, MAX_LEN, rng
            ),
            "slow readers": lambda s: load_cases.slow_readers(s, args.rounds, MAX_LEN, rng),
            "timeouts": lambda s: failure_cases.timeouts(s, NUM_BLOCKS, MAX_LEN, rng),
        },
        (*large, "--restart-engine"): {
            "killed core": lambda s: failure_cases.killed_core(s, MAX_LEN, rng)
        },
        small: {
            "full queue": lambda s: failure_cases.full_queue(
                s, NUM_RUNNING, NUM_QUEUED, MAX_LEN, rng
            )
        },
    }


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--model", help="id, folder or file (default: a tiny model)")
    parser.add_argument("--only", nargs="+", choices=CASES, default=CASES, metavar="CASE")
    parser.add_argument("--clients", type=int, default=128, help="streams at once")
    parser.add_argument("--requests", type=int, default=2000, help="streams in all")
    parser.add_argument("--disconnects", type=int, default=1000, help="clients that leave")
    parser.add_argument("--rounds", type=int, default=5, help="with slow readers and without")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--log", type=Path, help="file for the servers' output (default: none)")
    return parser.parse_args()


def run(args: argparse.Namespace, folder: Path) -> Iterator[Check]:
    """What each case finds, as soon as it is known."""
    rng = random.Random(args.seed)
    model = args.model or str(write_tiny_model(folder / "tiny"))
    log = args.log or folder / "server.log"
    for flags, cases in groups(args, rng).items():
        chosen = {name: case for name, case in cases.items() if name in args.only}
        if not chosen:
            continue
        with running_server(jaxinfer_command(model, *LIMITS, *flags), log) as server:
            for name, case in chosen.items():
                start = time.monotonic()
                yield from asyncio.run(case(server))  # type: ignore[arg-type]
                print(f"{name}: {time.monotonic() - start:.0f} s", file=sys.stderr, flush=True)


def main() -> int:
    args = parse_args()
    print(
        f"{describe_machine()}; {versions('jax', 'uvicorn')}; {Path(args.model or 'the tiny model').name}\n"
    )
    print("| case | | found | wanted | |\n|---|---|---|---|---|", flush=True)
    all_ok = True
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        try:
            for check in run(args, Path(folder)):
                all_ok = all_ok and check.ok
                mark = "" if check.ok else "MISSED"
                row = (check.case, check.what, check.found, check.wanted, mark)
                print(f"| {' | '.join(row)} |", flush=True)
        except ServerError as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
    return 0 if all_ok else 1


if __name__ == "__main__":
    sys.exit(main())
