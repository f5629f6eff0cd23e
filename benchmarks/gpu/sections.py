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
    compiles_ahead: bool = False
    """Whether a background process may compile its programs while the numerics are checked."""

    def cases(self, context: Context) -> list[Case]:
        build: Callable[[Context], list[Case]] = importlib.import_module(self.module).cases
        return build(context)


SECTIONS = (
    Section("peaks", "What the chip reaches", "benchmarks.gpu.peaks", 25),
    Section("numerics", "Kernels against float64", "benchmarks.gpu.numerics", 75),
    Section("decode", "Decode attention", "benchmarks.gpu.decode", 50, compiles_ahead=True),
    Section("engine", "The engine, 8B llama", "benchmarks.gpu.engine", 90, compiles_ahead=True),
    Section("prefill", "Prefill and mixed batches", "benchmarks.gpu.prefill", 35, True),
    Section("cache", "Cache update, shared prefix, MLA", "benchmarks.gpu.cache_ops", 35, True),
    Section("peers", "PyTorch and transformers", "benchmarks.gpu.peers", 65),
)
"""Sums to more than the run's deadline: sections seldom need all of theirs."""
