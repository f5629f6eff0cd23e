"""Claims of `add_rms_norm`: rows of the models that the engine knows by size, as far as the kernel's config takes them."""

from __future__ import annotations

import functools
from itertools import product
from typing import Any

from kernels_pallas.add_rms_norm import mosaic_gpu
from kernels_pallas.compile_table.case import Case, Expected, Program, array

NAME = "add_rms_norm"

_NUM_ROWS = 64
_SIZES = (576, 640, 1024, 2048, 3584, 4096, 5120, 8192, 16_384, 32_768)
_DTYPES = ("bfloat16", "float16", "float32")
_OPTIONS = {
    "one update": (1, False),
    "4 partial sums": (4, False),
    "8 partial sums, update normed": (8, True),
}
"""Float32 sums that a matmul leaves, and whether the update has a norm of its own."""


class AddRmsNorm:
    def claims(self) -> list[Case]:
        return [
            case
            for size, dtype, options in product(_SIZES, _DTYPES, _OPTIONS)
            if _takes(case := Case(NAME, size, 0, dtype, dtype, options))
        ]

    def program(self, case: Case) -> Program:
        add = functools.partial(mosaic_gpu.add_rms_norm, eps=1e-5, weight_offset=0.0)
        return Program(add, _arrays(case))

    def expected(self, case: Case) -> dict[str, Expected]:
        return {NAME: Expected()}


def _takes(case: Case) -> bool:
    try:
        mosaic_gpu.config_for(*_arrays(case))
    except ValueError:
        return False
    return True


def _arrays(case: Case) -> tuple[Any, ...]:
    num_sums, has_norm = _OPTIONS[case.options]
    weight = array(case.dtype, case.size)
    update = array(case.dtype if num_sums == 1 else "float32", num_sums, _NUM_ROWS, case.size)
    return array(case.dtype, _NUM_ROWS, case.size), update, weight, weight if has_norm else None
