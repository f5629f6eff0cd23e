"""Claims of `quantized_matmul`: the formats that the kernel takes, on the matmuls of a model of eight billion weights.

`Case.cache_dtype` says what the weight holds, `Case.size` the elements that are contracted.
"""

from __future__ import annotations

import functools
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
_EVERY = (("qkv", 16), ("qkv", 256))
_SOME = (("qkv", 1), ("qkv", 64), ("o", 16), ("gate and up", 16), ("down", 16), ("down", 64))
"""Matmuls and rows of x, of every format and of those that most checkpoints have."""
_COMMON = ("4 bits, groups of 128, zeros", "e4m3 x e4m3, rows")


class QuantizedMatmul:
    def claims(self) -> list[Case]:
        wanted = [(f, "bfloat16", *product) for f in _FORMATS for product in _EVERY]
        wanted += [(f, "bfloat16", *product) for f in _COMMON for product in _SOME]
        wanted += [(f, "float16", "qkv", 64) for f in _FORMATS if "x" not in f]
        wanted += [("e4m3 x e4m3, rows", "bfloat16", "qkv", 2048)]
        cases = [
            Case(NAME, _MATMULS[matmul][1], 0, dtype, format, f"{rows} rows, {matmul}")
            for format, dtype, matmul, rows in wanted
        ]
        return [
            case
            for case in cases
            if config.unsupported(*_shapes(case), _FORMATS[case.cache_dtype], case.dtype) is None
        ]

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
