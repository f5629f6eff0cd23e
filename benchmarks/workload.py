"""The three offline workloads: prompts of random token ids, greedy, end-of-sequence ignored.

    W1  throughput      64 requests, prompt lengths uniform in [32, 256], 64 output tokens each
    W2  shared prefix   64 requests, 512 common tokens and 32 of their own, 32 output tokens each
    W3  single stream   1 request, 32 prompt tokens, 128 output tokens

Random ids, because then no engine can win by finding an early end or an easy continuation. They start at 300, above
the special tokens of the models used here. Needs numpy only.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

FIRST_ID = 300
NAMES = ("W1", "W2", "W3")


@dataclass(frozen=True)
class Workload:
    name: str
    prompts: list[list[int]]
    max_tokens: int

    @property
    def num_prompt_tokens(self) -> int:
        return sum(len(prompt) for prompt in self.prompts)

    @property
    def num_output_tokens(self) -> int:
        return len(self.prompts) * self.max_tokens


def make_workload(name: str, vocab_size: int, seed: int = 0) -> Workload:
    """The same prompts for the same arguments, on every machine. Raises `ValueError` for another name."""
    rng = np.random.default_rng(seed)

    def ids(count: int) -> list[int]:
        return rng.integers(FIRST_ID, vocab_size, size=count).tolist()

    if name == "W1":
        lengths = rng.integers(32, 257, size=64).tolist()
        return Workload(name, [ids(length) for length in lengths], max_tokens=64)
    if name == "W2":
        prefix = ids(512)
        return Workload(name, [prefix + ids(32) for _ in range(64)], max_tokens=32)
    if name == "W3":
        return Workload(name, [ids(32)], max_tokens=128)
    raise ValueError(f"workload must be one of {NAMES}, got {name!r}.")
