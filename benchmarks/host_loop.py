"""Host time per decode step: schedule + batch building + update, with an executor that computes nothing.

    python benchmarks/host_loop.py [--running 16 256 1024] [--vllm PYTHON --vllm-model DIR]

With `--vllm`, vLLM's scheduler (schedule + update_from_output) is timed by that Python between our runs, in
`peers/host_loop_vllm.py`; `--vllm-model` is a model directory that it may read a config from.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import time
from pathlib import Path

import numpy as np

from jaxinfer.config import (
    CacheConfig,
    CompilationConfig,
    EngineConfig,
    LoadConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
)
from jaxinfer.engine.core import EngineCore
from jaxinfer.engine.messages import EngineCoreRequest
from jaxinfer.engine.plan import StepPlan, StepResult, TokenMask
from jaxinfer.engine.stats import DeviceMemory
from jaxinfer.engine.step_costs import StepCosts
from jaxinfer.executor.buckets import BucketLadder
from jaxinfer.executor.input_batch import InputBatch
from jaxinfer.sampling_params import SamplingParams

PROMPT_TOKENS, OUTPUT_TOKENS, BLOCK_SIZE, MAX_MODEL_LEN = 128, 256, 16, 2048
VOCAB_SIZE = 49152


def engine_config(num_running: int) -> EngineConfig:
    return EngineConfig(
        model=ModelConfig("fake", "fake", "float32", MAX_MODEL_LEN, VOCAB_SIZE),
        load=LoadConfig(),
        cache=CacheConfig(BLOCK_SIZE),
        scheduler=SchedulerConfig(max_num_batched_tokens=8192, max_num_seqs=num_running),
        parallel=ParallelConfig(),
        compilation=CompilationConfig(),
        device="cpu",
    )


class Token:
    """A result that is ready."""

    def __init__(self, num_rows: int) -> None:
        self._result = StepResult(np.full(num_rows, 7, np.int32), np.zeros(num_rows, np.bool_))

    def result(self) -> StepResult:
        return self._result


class NoDevice:
    """Builds each step's input arrays as the real executor does, timed, and leaves out the device."""

    def __init__(self, config: EngineConfig, num_blocks: int) -> None:
        limits = config.scheduler
        ladder = BucketLadder.create(
            limits.max_num_batched_tokens, limits.max_num_seqs, config.max_blocks_per_seq
        )
        self.num_blocks = num_blocks
        self.num_compilations = 0
        self.asleep = frozenset()
        self.step_costs = StepCosts(3e9, 1e8, 1e4, 6e9, 4096.0, ((None, 32),))
        self.packing = 0.0
        self._batch = InputBatch(
            limits.max_num_seqs, config.max_blocks_per_seq, config.cache.block_size, ladder
        )

    def device_memory(self) -> DeviceMemory:
        return DeviceMemory(0, 1)

    def execute_model(self, plan: StepPlan) -> None:
        self.plan = plan
        start = time.perf_counter()
        self._batch.apply(plan)
        self._batch.pack(plan)
        self.packing = time.perf_counter() - start

    def sample_tokens(self, mask: TokenMask | None) -> Token:
        return Token(len(self.plan.rows))

    def shutdown(self) -> None:
        pass


def time_decode_steps(num_running: int) -> dict[str, float]:
    """Over the steps in which all requests decode, in ms: medians, mean and 99th percentile. `all` is the time of all
    steps, prompts and ends included, per output token and in µs."""
    config = engine_config(num_running)
    executor = NoDevice(config, num_running * 40)
    core = EngineCore(config, executor)
    rng = random.Random(0)
    for i in range(num_running):
        prompt = [rng.randrange(300, 40000) for _ in range(PROMPT_TOKENS)]
        params = SamplingParams(temperature=0.0, max_tokens=OUTPUT_TOKENS, ignore_eos=True)
        core.add_request(EngineCoreRequest(str(i), prompt, params, 0.0))
    steps, packing = [], []
    total = 0.0
    while core.has_unfinished():
        start = time.perf_counter()
        core.step()
        elapsed = time.perf_counter() - start
        total += elapsed
        plan = executor.plan
        if len(plan.rows) == num_running and plan.num_tokens == num_running:
            steps.append(elapsed)
            packing.append(executor.packing)
    return {
        "step": statistics.median(steps) * 1e3,
        "mean": statistics.fmean(steps) * 1e3,
        "p99": sorted(steps)[len(steps) * 99 // 100] * 1e3,
        "all": total / (num_running * OUTPUT_TOKENS) * 1e6,
        "packing": statistics.median(packing) * 1e3,
    }


def time_vllm(python: str, model: str, num_running: int) -> float:
    """vLLM's schedule + update, median over the pure decode steps, in ms."""
    script = Path(__file__).parent / "peers" / "host_loop_vllm.py"
    run = subprocess.run(
        [python, str(script), model, str(num_running)], capture_output=True, text=True, timeout=600
    )
    if run.returncode:
        raise RuntimeError(f"{script} failed:\n{run.stderr[-2000:]}")
    times = json.loads(run.stdout.splitlines()[-1])
    return float(times["schedule_ms"] + times["update_ms"])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--running", type=int, nargs="+", default=[16, 256, 1024])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--vllm", metavar="PYTHON", help="a Python that has vLLM")
    parser.add_argument("--vllm-model", metavar="DIR", help="a model directory for its config")
    args = parser.parse_args()
    if args.vllm and not args.vllm_model:
        parser.error("--vllm needs --vllm-model")
    print(
        f"{'running':>8} {'ms/step':>8} {'mean':>8} {'p99':>8} {'packing':>8} {'µs/token':>8}  vLLM ms/step  ratio"
    )
    for num_running in args.running:
        ours: list[dict[str, float]] = []
        peer: list[float] = []
        for _ in range(args.rounds):
            ours.append(time_decode_steps(num_running))
            if args.vllm:
                peer.append(time_vllm(args.vllm, args.vllm_model, num_running))
        best = min(ours, key=lambda times: times["step"])
        columns = [best[name] for name in ("step", "mean", "p99", "packing", "all")]
        line = f"{num_running:8}" + "".join(f" {value:8.3f}" for value in columns)
        if peer:
            line += f"  {min(peer):12.2f}  {best['step'] / min(peer):5.3f}"
        print(line, flush=True)


if __name__ == "__main__":
    main()
