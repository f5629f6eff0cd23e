"""Process start to first token, with a cold and with a warm compilation cache, and where the time goes.

    python benchmarks/startup.py [--model MODEL] [--runs 3]

Each measurement is a new Python process; `imports` are cumulative marks in the order in which the engine needs them.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from machine import describe_machine, seconds_since_process_start, versions

STAGES = (
    "interpreter",
    "import jaxinfer",
    "import jax",
    "import flax.nnx",
    "engine ready",
    "first token",
)


type Mark = tuple[float, float]
"""Wall seconds since the process started, and CPU seconds that it has used."""


def mark() -> Mark:
    return seconds_since_process_start(), time.process_time()


def child(model: str, dtype: str, cache_dir: str) -> None:
    """Runs in the measured process; prints the mark of each stage as one JSON line."""
    marks = [mark()]

    import jaxinfer  # noqa: F401

    marks.append(mark())

    import jax  # noqa: F401

    marks.append(mark())

    import flax.nnx  # noqa: F401

    marks.append(mark())

    from jaxinfer import LLM, SamplingParams

    llm = LLM(model, dtype=dtype, max_model_len=512, compilation_cache_dir=cache_dir)
    marks.append(mark())
    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    llm.generate(["The capital of France is"], params, use_tqdm=False)
    marks.append(mark())
    print(json.dumps(marks))


def measure(args: argparse.Namespace, cache_dir: str) -> list[Mark]:
    command = [sys.executable, __file__, "--child", cache_dir]
    command += ["--model", args.model, "--dtype", args.dtype]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--child", metavar="CACHE_DIR", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        child(args.model, args.dtype, args.child)
        return

    print(
        f"{describe_machine()}; {versions('jax', 'flax')}; {Path(args.model).name}, {args.dtype}\n"
    )
    cold, warm = [], []
    for _ in range(args.runs):
        with tempfile.TemporaryDirectory(prefix="jaxinfer-startup-") as cache_dir:
            cold.append(measure(args, cache_dir))
            warm.append(measure(args, cache_dir))
    print(
        f"| seconds since process start, median of {args.runs} | cold cache | warm cache | warm: CPU |"
    )
    print("|---|---|---|---|")
    for index, stage in enumerate(STAGES):
        cold_wall = statistics.median(run[index][0] for run in cold)
        warm_wall, warm_cpu = (statistics.median(run[index][k] for run in warm) for k in (0, 1))
        print(f"| {stage} | {cold_wall:.2f} | {warm_wall:.2f} | {warm_cpu:.2f} |")


if __name__ == "__main__":
    main()
