"""Claims of `quantized_matmul`: the formats that the kernel takes, on the matmuls of a model of eight billion weights.

`Case.cache_dtype` says what the weight holds, `Case.size` the elements that are contracted.
"""

from __future__ import annotations

import functools
import itertools
from typing import Any

import jax.numpy as jnp

from kernels_pallas.compile_table.case import Case, Expected, Program, array
from kernels_pallas.quantized_matmul import mosaic_gpu_config as config
from kernels_pallas.quantized_matmul.format import WeightFormat
from kernels_pallas.quantized_matmul.weight import QuantizedWeight

NAME = "quantized_matmul"

_FORMATS = {
    "4 bits, groups of 128, zeros": WeightFormat("uint4", 128, zeros=True, pack_block=64),
    "4 bits, groups of 128": WeightFormat("uint4", 128, zero=8, scales="bfloat16", pack_block=64),
    "4 bits, groups of 64, zeros": WeightFormat("uint4", 64, zeros=True, pack_block=64),
    "4 bits, groups of 32, minima": WeightFormat("uint4", 32, minima="float16", pack_block=64),
    "int8, rows": WeightFormat("int8", None, scales="float32"),
    "int8, groups of 32": WeightFormat("int8", 32),
    "e4m3, rows": WeightFormat("e4m3", None, scales="float32"),
    "e4m3, groups of 128": WeightFormat("e4m3", 128, scales="float32"),
    "int8 x int8, rows": WeightFormat("int8", None, scales="float32", activation="int8"),
    "e4m3 x e4m3, rows": WeightFormat("e4m3", None, scales="float32", activation="e4m3"),
    "e4m3 x e4m3, groups of 128": WeightFormat("e4m3", 128, scales="float32", activation="e4m3"),
}
_MATMULS = {
    "qkv": (6144, 4096),
    "o": (4096, 4096),
    "gate and up": (28672, 4096),
    "down": (4096, 14336),
}
_ROWS = {"qkv": (1, 16, 64, 256, 2048), "o": (64,), "gate and up": (16,), "down": (16,)}
"""Of x."""
_DTYPES = ("bfloat16", "float16")


class QuantizedMatmul:
    def claims(self) -> list[Case]:
        cases = []
        for format, (matmul, all_rows), dtype in itertools.product(
            _FORMATS, _ROWS.items(), _DTYPES
        ):
            for rows in all_rows:
                if dtype == "float16" and (matmul, rows) not in (("qkv", 1), ("qkv", 64)):
                    continue
                case = Case(NAME, _MATMULS[matmul][1], 0, dtype, format, f"{rows} rows, {matmul}")
                if config.unsupported(*_shapes(case), _FORMATS[format], dtype) is None:
                    cases.append(case)
        return cases

    def program(self, case: Case) -> Program:
        from kernels_pallas.quantized_matmul import mosaic_gpu

        x, shape = _shapes(case)
        format = _FORMATS[case.cache_dtype]
        multiply = functools.partial(mosaic_gpu.quantized_matmul, dtype=jnp.dtype(case.dtype))
        return Program(multiply, (x, QuantizedWeight(format, **format.arrays(shape))))

    def expected(self, case: Case) -> dict[str, Expected]:
        x, shape = _shapes(case)
        kinds = config.Operands.of(_FORMATS[case.cache_dtype])
        sizes = config.config_for(x.shape[0], *shape, kinds, case.dtype)
        return {
            NAME: Expected(
                matmuls=True,
                loads=True,
                stores=True,
                stages=sizes.stages,
                stage_bytes=sizes.stage_bytes,
                least_in_flight=64 << 10,
                read_by_threads=("tiles.store_plain(self.refs",),
                shared_memory=sizes.shared_memory,
            )
        }


def _shapes(case: Case) -> tuple[Any, tuple[int, int]]:
    rows, matmul = case.options.split(" rows, ")
    shape = _MATMULS[matmul]
    return array(case.dtype, int(rows), shape[1]), shape
