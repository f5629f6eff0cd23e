"""What an operation claims to do on a GPU, one combination at a time, and what its kernels must look like."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import jax


@dataclass(frozen=True, slots=True, order=True)
class Case:
    """One combination that compiles into one or more kernels."""

    operation: str
    size: int
    """Of a head; of a row for operations that know no heads."""
    page_size: int
    """0 for operations without pages."""
    dtype: str
    cache_dtype: str
    options: str

    def __str__(self) -> str:
        cache = "" if self.cache_dtype == self.dtype else f", cache {self.cache_dtype}"
        return (
            f"{self.operation}, size {self.size}, page size {self.page_size}, "
            f"{self.dtype}{cache}, options {self.options}"
        )

    @property
    def features(self) -> frozenset[tuple[str, Any]]:
        """What a selection should hold at least once, per operation."""
        names = ("size", "page_size", "dtype", "cache_dtype", "options")
        return frozenset((name, getattr(self, name)) for name in names)


@dataclass(frozen=True, slots=True)
class Expected:
    """Of one kernel. A kernel without a ring of its own leaves `stages` at None."""

    matmuls: bool = False
    loads: bool = False
    """Into shared memory, by TMA."""
    stores: bool = False
    """Out of shared memory, by TMA."""
    stages: int | None = None
    """Of the ring in shared memory that loads fill."""
    stage_bytes: int = 0
    stages_in_use: int = 1
    """Worked on at a time, so that nothing can be loaded into them."""
    least_in_flight: int = 0
    """Bytes that each core must have on their way."""
    read_by_threads: tuple[str, ...] = ()
    """Beginnings of the lines of source that store to shared memory which neither matmuls nor copies touch."""
    most_spilled: int = 0
    """Bytes stored and loaded that are known to spill and were judged harmless."""
    shared_memory: int | None = None
    """What the kernel's config accounts for, of a block."""


@dataclass(frozen=True, slots=True)
class Program:
    """A function and the shapes to compile it for."""

    fn: Callable[..., Any]
    args: tuple[Any, ...]
    donate_argnums: tuple[int, ...] = ()


class Operation(Protocol):
    """`Case.operation` is the name of the module in `kernels_pallas` that holds the operation."""

    def claims(self) -> list[Case]:
        """Every combination, as the operation's own check of its arguments has it."""

    def program(self, case: Case) -> Program: ...

    def expected(self, case: Case) -> dict[str, Expected]:
        """By the kernels' names; a case compiles into these kernels and no others."""


def array(dtype: Any, *shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def select(cases: Sequence[Case], words: Sequence[str]) -> list[Case]:
    """The cases whose names hold all of some words."""
    return [case for case in cases if all(word in str(case) for word in words)]


def spread(cases: Sequence[Case]) -> list[Case]:
    """Few cases that hold every feature of every operation at least once, and together many pairs of them."""
    chosen: list[Case] = []
    for operation in dict.fromkeys(case.operation for case in cases):
        rest = [case for case in cases if case.operation == operation]
        missing = frozenset[tuple[str, Any]]().union(*(case.features for case in rest))
        uses: dict[tuple[str, Any], int] = dict.fromkeys(missing, 0)
        while missing:
            best = max(
                rest, key=lambda c: (len(c.features & missing), -sum(map(uses.get, c.features)))
            )
            chosen.append(best)
            rest.remove(best)
            missing -= best.features
            for feature in best.features:
                uses[feature] += 1
    return chosen
