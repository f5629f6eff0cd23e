"""What attending to a shared beginning once saves: decode steps and throughput with it and without, interleaved.

    python benchmarks/shared_prefix.py MODEL [--sizes 64x512 16x512 8x256] [--rounds 5]

Both engines live in one process and take turns. A decode step is the difference between runs that generate 33 tokens
and 1, with all prompts in the prefix cache, by 32. "W2" (see `workload.py`) is timed as a whole, from empty caches.
The run fails when the two engines' tokens differ in float32.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time

import numpy as np
from machine import CoreMeter, describe_machine, versions
from workload import FIRST_ID, make_workload

from jaxinfer import LLM, SamplingParams

OWN_TOKENS, STEPS = 32, 32


def generate(llm: LLM, prompts: list[list[int]], max_tokens: int) -> tuple[float, list[list[int]]]:
    """Wall seconds and the tokens."""
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    requests = [{"prompt_token_ids": prompt} for prompt in prompts]
    start = time.perf_counter()
    outputs = llm.generate(requests, params, use_tqdm=False)
    wall = time.perf_counter() - start
    return wall, [list(output.outputs[0].token_ids) for output in outputs]


def decode_step(llm: LLM, prompts: list[list[int]]) -> tuple[float, list[list[int]]]:
    """Milliseconds of a step in which all prompts decode."""
    llm.reset_prefix_cache()
    generate(llm, prompts, 1)
    short, _ = generate(llm, prompts, 1)
    long, tokens = generate(llm, prompts, 1 + STEPS)
    return (long - short) / STEPS * 1e3, tokens


def make_prompts(rows: int, prefix: int, vocab_size: int) -> list[list[int]]:
    rng = np.random.default_rng(rows * prefix)
    tokens = rng.integers(FIRST_ID, vocab_size, size=(rows, prefix + OWN_TOKENS))
    tokens[:, :prefix] = tokens[0, :prefix]
    return tokens.tolist()


def throughput(llm: LLM, seed: int, vocab_size: int) -> tuple[float, list[list[int]]]:
    """W2's output tokens per second."""
    work = make_workload("W2", vocab_size, seed)
    llm.reset_prefix_cache()
    wall, tokens = generate(llm, work.prompts, work.max_tokens)
    return work.num_output_tokens / wall, tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--sizes", nargs="*", default=["64x512", "16x512", "8x512", "64x256"])
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    sizes = [tuple(map(int, size.split("x"))) for size in args.sizes]
    max_model_len = max([prefix for _, prefix in sizes] + [512]) + 128
    engines = {
        name: LLM(
            args.model,
            dtype=args.dtype,
            max_model_len=max_model_len,
            max_num_seqs=64,
            disable_cascade_attn=name == "off",
            cascade_min_rows=2,
            cascade_min_tokens=16,
        )
        for name in ("off", "on")
    }
    vocab_size = engines["on"].config.model.vocab_size
    print(f"{describe_machine()}, {versions('jax')}, {args.dtype}")
    print(f"{'case':10} {'off':>8} {'on':>8} {'gain':>6} {'equal tokens':>13} {'other cores':>12}")
    failed = False
    for case in [*sizes, "W2"]:
        times: dict[str, list[float]] = {name: [] for name in engines}
        others, equal = [], []
        for turn in range(args.rounds + 1):
            tokens = {}
            for name in sorted(engines, reverse=turn % 2 == 1):
                with CoreMeter(os.getpid()) as meter:
                    if case == "W2":
                        measured, tokens[name] = throughput(engines[name], turn, vocab_size)
                    else:
                        prompts = make_prompts(*case, vocab_size)
                        measured, tokens[name] = decode_step(engines[name], prompts)
                if turn:  # the first round warms up
                    times[name].append(measured)
                    others.append(meter.other)
            pairs = zip(tokens["off"], tokens["on"], strict=True)
            equal.append(statistics.fmean(a == b for a, b in pairs))
        ratios = [off / on for off, on in zip(times["off"], times["on"], strict=True)]
        off, on = (statistics.median(times[name]) for name in ("off", "on"))
        label, unit = ("W2", "tok/s") if case == "W2" else (f"{case[0]} x {case[1]}", "ms")
        ratio = statistics.median(ratios)
        print(
            f"{label:10} {off:8.1f} {on:8.1f} {ratio if unit == 'ms' else 1 / ratio:6.2f} "
            f"{min(equal):13.0%} {statistics.fmean(others):12.2f}  {unit}",
            flush=True,
        )
        failed |= args.dtype == "float32" and min(equal) < 1
    sys.exit(failed)


if __name__ == "__main__":
    main()
