"""Claims of `ragged_paged_attention`: whatever `mosaic_gpu_config.unsupported` has nothing against."""

from __future__ import annotations

import functools
from itertools import product
from typing import Any

import jax.numpy as jnp

from kernels_pallas.compile_table.case import Case, Expected, Program, array
from kernels_pallas.ragged_paged_attention import mosaic_gpu_config as config

NAME = "ragged_paged_attention"

_KV_HEADS, _GROUP = 8, 4
_DTYPES = ("bfloat16", "float16", "float32")
_CACHE_DTYPES = (*_DTYPES, "float8_e4m3fn", "float8_e5m2", "int8")
_HEAD_SIZES = range(8, 513, 8)
_PAGE_SIZES = [1 << n for n in range(11)]
_OPTIONS: dict[str, dict[str, Any]] = {
    "none": {},
    "window, cap": {"sliding_window": 1000, "soft_cap": 30.0},
}


class RaggedPagedAttention:
    def claims(self) -> list[Case]:
        return [
            Case(NAME, head_size, page_size, dtype, cache, options)
            for head_size, page_size, dtype, cache, options in product(
                _HEAD_SIZES, _PAGE_SIZES, _DTYPES, _CACHE_DTYPES, _OPTIONS
            )
            if cache == dtype
            and config.unsupported(_queries(head_size, dtype), _pages(head_size, page_size, cache))
            is None
        ]

    def program(self, case: Case) -> Program:
        from kernels_pallas.ragged_paged_attention import mosaic_gpu

        pages = _pages(case.head_size, case.page_size, case.cache_dtype)
        args = (
            _queries(case.head_size, case.dtype),
            (pages, pages),
            array(jnp.int32, 16, 128),
            array(jnp.int32, 16),
            array(jnp.int32, 17),
        )
        attend = functools.partial(
            mosaic_gpu.ragged_paged_attention, scale=0.1, **_OPTIONS[case.options]
        )
        return Program(attend, args)

    def expected(self, case: Case) -> dict[str, Expected]:
        size, item = case.head_size, jnp.dtype(case.cache_dtype).itemsize
        decode, prefill = config.decode_config(size), config.prefill_config(size)
        return {
            "paged_decode": Expected(
                matmuls=True,
                loads=True,
                stores=True,
                stages=decode.stages,
                stage_bytes=2 * decode.block_tokens * size * item,
                least_in_flight=64 << 10,
                shared_memory=decode.shared_memory(size, item),
            ),
            "paged_decode_merge": Expected(stores=True),
            "paged_prefill": Expected(
                matmuls=True,
                loads=True,
                stores=True,
                stages=prefill.stages,
                stage_bytes=2 * prefill.block_tokens * size * item,
                shared_memory=prefill.shared_memory(size, item),
            ),
        }


def _queries(head_size: int, dtype: str) -> Any:
    return array(dtype, 256, _KV_HEADS * _GROUP, head_size)


def _pages(head_size: int, page_size: int, dtype: str) -> Any:
    return array(dtype, 512, _KV_HEADS, page_size, head_size)
