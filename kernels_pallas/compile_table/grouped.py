"""Claims of `grouped_matmul`: experts of published models, whole and cut over devices, as far as the kernel takes them."""

from __future__ import annotations

import functools
from itertools import product
from typing import Any

import jax.numpy as jnp

from kernels_pallas.compile_table.case import Case, Expected, Program, array
from kernels_pallas.grouped_matmul import mosaic_gpu_config as config

NAME = "grouped_matmul"

_SIZES = (256, 1024, 2880, 7168)
_DTYPES = ("bfloat16", "float16", "float32")
_OPTIONS = {
    "64 rows of 128 groups": (64, 128, 4096),
    "1024 rows of 8 groups": (1024, 8, 2880),
}
"""Rows, groups and outputs."""


class GroupedMatmul:
    def claims(self) -> list[Case]:
        return [
            case
            for size, dtype, options in product(_SIZES, _DTYPES, _OPTIONS)
            if config.unsupported(
                *_arrays(case := Case(NAME, size, 0, dtype, dtype, options))[:2], dtype
            )
            is None
        ]

    def program(self, case: Case) -> Program:
        from kernels_pallas.grouped_matmul import mosaic_gpu

        multiply = functools.partial(mosaic_gpu.grouped_matmul, dtype=jnp.dtype(case.dtype))
        return Program(multiply, _arrays(case))

    def expected(self, case: Case) -> dict[str, Expected]:
        sizes = config.config_for(*_OPTIONS[case.options], case.dtype)
        return {
            NAME: Expected(
                matmuls=True,
                loads=True,
                stores=True,
                stages=sizes.stages,
                stage_bytes=sizes.stage_bytes,
                stages_in_use=2,
                least_in_flight=64 << 10,
                read_by_threads=("tiles.store_plain(out_s",),
                shared_memory=sizes.shared_memory,
            )
        }


def _arrays(case: Case) -> tuple[Any, ...]:
    num_rows, num_groups, num_outputs = _OPTIONS[case.options]
    return (
        array(case.dtype, num_rows, case.size),
        array(case.dtype, num_groups, num_outputs, case.size),
        array(jnp.int32, num_groups),
        array(jnp.int32),
    )
