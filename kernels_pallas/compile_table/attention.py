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
_EIGHT_BITS = ("float8_e4m3fn", "float8_e5m2", "int8")
_HEAD_SIZES = range(8, 513, 8)
_PAGE_SIZES = [1 << n for n in range(11)]

_OPTIONS: dict[str, dict[str, Any]] = {
    "none": {},
    "window, cap": {"sliding_window": 1000, "soft_cap": 30.0},
    "window, cap, sinks, lse": {
        "sliding_window": 1000,
        "soft_cap": 30.0,
        "sinks": True,
        "return_lse": True,
    },
    "not causal, lse": {"causal": False, "return_lse": True},
}
"""By the names in a table; sinks are an array that the program makes."""


class RaggedPagedAttention:
    def claims(self) -> list[Case]:
        """Of options of which one set contains another, the larger one."""
        caches = [(dtype, cache) for dtype in _DTYPES for cache in (dtype, *_EIGHT_BITS)]
        cases = [
            Case(NAME, head_size, page_size, dtype, cache, options)
            for head_size, page_size, (dtype, cache), options in product(
                _HEAD_SIZES, _PAGE_SIZES, caches, _OPTIONS
            )
        ]
        claimed = [case for case in cases if _takes(case)]
        all_options = {case.options for case in claimed}
        contained = {o for o in all_options if any(p != o and p.startswith(o) for p in all_options)}
        return [case for case in claimed if case.options not in contained]

    def program(self, case: Case) -> Program:
        from kernels_pallas.ragged_paged_attention import mosaic_gpu

        options = dict(_OPTIONS[case.options])
        has_sinks = options.pop("sinks", False)
        has_scales = case.cache_dtype in _EIGHT_BITS

        def attend(*arrays: Any) -> Any:
            rest = list(arrays[5:])
            sinks = rest.pop() if has_sinks else None
            scales = tuple(rest) if has_scales else None
            return mosaic_gpu.ragged_paged_attention(
                *arrays[:5], scale=0.1, sinks=sinks, kv_scales=scales, **options
            )

        pages = _pages(case)
        scales = [array(jnp.float32, _KV_HEADS)] * 2 if has_scales else []
        sinks = [array(jnp.float32, _KV_HEADS * _GROUP)] if has_sinks else []
        args = (
            _queries(case),
            (pages, pages),
            array(jnp.int32, 16, 128),
            array(jnp.int32, 16),
            array(jnp.int32, 17),
            *scales,
            *sinks,
        )
        return Program(attend, args)

    def expected(self, case: Case) -> dict[str, Expected]:
        size, item = case.size, jnp.dtype(case.cache_dtype).itemsize
        decode, prefill = config.decode_config(size), config.prefill_config(size)
        ring = functools.partial(Expected, matmuls=True, loads=True, stores=True)
        return {
            "paged_decode": ring(
                stages=decode.stages,
                stage_bytes=2 * decode.block_tokens * size * item,
                least_in_flight=64 << 10,
                shared_memory=decode.shared_memory(size, item),
            ),
            "paged_decode_merge": Expected(stores=True),
            "paged_prefill": ring(
                stages=prefill.stages,
                stage_bytes=2 * prefill.block_tokens * size * item,
                shared_memory=prefill.shared_memory(size, item),
            ),
        }


def _takes(case: Case) -> bool:
    options = _OPTIONS[case.options]
    reason = config.unsupported(
        _queries(case),
        _pages(case),
        causal=options.get("causal", True),
        has_sinks="sinks" in options,
        return_lse="return_lse" in options,
    )
    return reason is None


def _queries(case: Case) -> Any:
    return array(case.dtype, 256, _KV_HEADS * _GROUP, case.size)


def _pages(case: Case) -> Any:
    return array(case.cache_dtype, 512, _KV_HEADS, case.page_size, case.size)
