"""What `deterministic=True` costs: decoding and prompts with it and without, interleaved.

    python benchmarks/deterministic.py MODEL [--dtype bfloat16] [--context 128] [--rounds 5]

Both engines live in one process and take turns, each round in the other order. "decode B" is the rate at which B requests of
CONTEXT tokens each go on, from runs that generate 17 tokens and 1; "prefill" is one prompt of 512 tokens, with no token in
the prefix cache. Given are medians, and the median of the per-round ratios to the ordinary engine.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time

import numpy as np
from machine import CoreMeter, describe_machine, versions
from workload import FIRST_ID

from jaxinfer import LLM, SamplingParams

STEPS = 16
PROMPT = 512


def seconds(llm: LLM, prompts: list[list[int]], max_tokens: int) -> float:
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    start = time.perf_counter()
    llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
    return time.perf_counter() - start


def tokens_per_second(llm: LLM, case: str, prompts: list[list[int]]) -> float:
    llm.reset_prefix_cache()
    if case == "prefill":
        return PROMPT / seconds(llm, prompts, 1)
    seconds(llm, prompts, 1)
    short = seconds(llm, prompts, 1)
    return len(prompts) * STEPS / (seconds(llm, prompts, 1 + STEPS) - short)


def engine(args: argparse.Namespace, deterministic: bool) -> LLM:
    return LLM(
        args.model,
        dtype=args.dtype,
        max_model_len=PROMPT + args.context,
        max_num_seqs=64,
        deterministic=deterministic,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    engines = {"ordinary": engine(args, False), "deterministic": engine(args, True)}
    vocab_size = engines["ordinary"].config.model.vocab_size
    print(f"{describe_machine()}, {versions('jax')}, {args.dtype}, context {args.context}")
    rng = np.random.default_rng(0)
    for case, rows, length in (
        ("decode 1", 1, args.context),
        ("decode 16", 16, args.context),
        ("prefill", 1, PROMPT),
    ):
        rates: dict[str, list[float]] = {name: [] for name in engines}
        others = []
        for turn in range(args.rounds + 1):
            prompts = rng.integers(FIRST_ID, vocab_size, size=(rows, length)).tolist()
            for name in sorted(engines, reverse=turn % 2 == 1):
                with CoreMeter(os.getpid()) as meter:
                    rate = tokens_per_second(engines[name], case, prompts)
                if turn:  # the first round compiles
                    rates[name].append(rate)
                    others.append(meter.other)
        for name, own in rates.items():
            ratios = [a / b for a, b in zip(own, rates["ordinary"], strict=True)]
            print(
                f"{case:10} {name:13} {statistics.median(own):8.1f} tokens/s "
                f"{statistics.median(ratios):6.2f}",
                flush=True,
            )
        print(f"{case:10} other cores {statistics.fmean(others):.2f}", flush=True)


if __name__ == "__main__":
    main()
