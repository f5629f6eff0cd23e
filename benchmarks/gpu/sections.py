"""The sections of the run, in order of their worth should the time run out, and how long each may take."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.gpu.cases import Case, Context


@dataclass(frozen=True)
class Section:
    """`module` has a function `cases(context)`."""

    name: str
    title: str
    module: str
    seconds: float
    """Its budget on a GPU; what earlier sections left over is added."""
    prepared: bool = False
    """Whether its process starts before its turn, and compiles while the numerics are checked."""
    timed: bool = True
    """Whether it waits for all its programs before it runs the first: compilers would disturb it."""

    def cases(self, context: Context) -> list[Case]:
        build: Callable[[Context], list[Case]] = importlib.import_module(self.module).cases
        return build(context)


SECTIONS = (
    Section("peaks", "What the chip reaches", "benchmarks.gpu.peaks", 25),
    Section("numerics", "Kernels against float64", "benchmarks.gpu.numerics", 80, timed=False),
    Section("decode", "Decode attention", "benchmarks.gpu.decode", 40, prepared=True),
    Section("engine", "The engine, 8B llama", "benchmarks.gpu.engine", 75, prepared=True),
    Section("prefill", "Prefill and mixed batches", "benchmarks.gpu.prefill", 25, prepared=True),
    Section("cache", "Cache update, shared prefix, MLA", "benchmarks.gpu.cache_ops", 25, True),
    Section("peers", "PyTorch and transformers", "benchmarks.gpu.peers", 70),
)
"""In all 340 s, at most: sections seldom need all of theirs, and leave the rest to the next ones."""

PREPARE_DURING = "numerics"
