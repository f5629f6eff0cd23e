"""Prefill and mixed batches: the time of one layer beside the longer of its two floors, matrix products and bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.gpu import calls, contiguous
from benchmarks.gpu.batches import Heads, attention_bytes, attention_flops
from benchmarks.gpu.cases import Case, Context
from benchmarks.gpu.decode import attention_pool
from benchmarks.gpu.kv_pool import Program
from benchmarks.gpu.once import Once

Rows = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Shape:
    """(context, query tokens) of the requests, and what the program is padded to."""

    name: str
    rows: Rows
    num_rows: int
    num_tokens: int


PROMPTS = (
    Shape("1 x 8192", ((8192, 8192),), 1, 8192),
    Shape("8 x 2048", ((2048, 2048),) * 8, 64, 16_384),
    Shape("64 x 256", ((256, 256),) * 64, 64, 16_384),
    Shape("2048 onto 30720", ((32_768, 2048),), 1, 2048),
)
MIXED = (
    Shape(
        "63 decodes x 4096 + 1985 onto 4096", ((4096, 1),) * 63 + ((4096 + 1985, 1985),), 64, 2048
    ),
    Shape("200 decodes x 1024 + 2 x 924", ((1024, 1),) * 200 + ((924, 924),) * 2, 256, 2048),
)
DRY = (
    Shape("1 x 48", ((48, 48),), 4, 48),
    Shape("3 decodes + 21 onto 40", ((50, 1),) * 3 + ((61, 21),), 4, 48),
)
CHAIN = 4


def cases(context: Context) -> list[Case]:
    timed = Prefill(context)
    shapes = context.pick((*PROMPTS, *MIXED), DRY)
    contiguous_shapes = context.pick(((1, 8192), (8, 2048)), ((1, 48),))
    xla_shapes = context.pick((PROMPTS[0], MIXED[0]), DRY[-1:])
    heads = timed.pool.heads
    return [
        *(timed.case(shape) for shape in shapes),
        *(contiguous.prefill_case(context, heads, *shape) for shape in contiguous_shapes),
        *(timed.case(shape, group=8) for shape in shapes[:1]),
        *(timed.case(shape, implementation="xla") for shape in xla_shapes),
    ]


class Prefill:
    """One program per padded size, group and implementation."""

    def __init__(self, context: Context) -> None:
        self.context, self.pool, self._once = context, attention_pool(context), Once()

    def program(self, *key: Any) -> Program:
        return self._once.get(key, lambda: self._program(*key))

    def _program(
        self, num_rows: int, num_tokens: int, group: int, implementation: str | None
    ) -> Program:
        attend = calls.attention(implementation, scale=self.pool.heads.size**-0.5)
        chain = 1 if implementation else self.context.pick(CHAIN, 2 if group == 4 else 1)
        return Program(attend, self.pool, num_rows, num_tokens, group, chain)

    def case(self, shape: Shape, group: int = 4, implementation: str | None = None) -> Case:
        key = (shape.num_rows, shape.num_tokens, group, implementation)

        def compile_() -> Any:
            return self._once.get(("compiled", *key), lambda: self.program(*key).compiled)

        def run() -> dict[str, Any]:
            compile_()
            timing = self.program(*key).time(self.context, shape.rows)
            heads = Heads(self.pool.heads.kv, group, self.pool.heads.size)
            return {**timing.values(), **floors(self.context, heads, shape.rows, timing.seconds)}

        name = shape.name if group == 4 else f"{shape.name}, GQA {group}"
        if implementation:
            name += f", {implementation.upper()}"
        return Case(name, run, compile_, limit=45 if implementation else 30)


def floors(
    context: Context, heads: Heads, rows: Sequence[tuple[int, int]], seconds: float
) -> dict[str, Any]:
    """The longer floor of a ragged batch, and the fraction that `seconds` makes of it."""
    products = attention_flops(heads, rows) / context.matmul
    transfers = attention_bytes(heads, rows) / context.bandwidth
    floor = max(products, transfers)
    of = "matmul peak" if products >= transfers else "copy bandwidth"
    return {"floor_seconds": floor, "fraction": floor / seconds, "of": of}
