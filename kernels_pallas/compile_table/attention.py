"""Claims of `ragged_paged_attention`: whatever `mosaic_gpu_config.unsupported` has nothing against."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from typing import Any

import jax.numpy as jnp

from kernels_pallas.compile_table.case import Case, Expected, Program, array
from kernels_pallas.ragged_paged_attention import mosaic_gpu_config as config

NAME = "ragged_paged_attention"

_KV_HEADS, _GROUP = 8, 4
_ROWS, _TOKENS = 16, 256
_DTYPES = ("bfloat16", "float16", "float32")
_EIGHT_BITS = ("float8_e4m3fn", "float8_e5m2", "int8")
_HEAD_SIZES = range(8, 513, 8)
_PAGE_SIZES = [1 << n for n in range(11)]


@dataclass(frozen=True, slots=True)
class _Options:
    decode_only: bool = False
    everything: bool = False
    """Sliding window and soft cap."""
    page_sizes: tuple[int, ...] | None = None
    """Where the option adds nothing to the page sizes that others are compiled for, only these."""


_OPTIONS = {
    "mixed, window, cap": _Options(everything=True),
    "mixed": _Options(page_sizes=(16,)),
    "decode only": _Options(decode_only=True, page_sizes=(64,)),
}


class RaggedPagedAttention:
    def claims(self) -> list[Case]:
        caches = [(dtype, cache) for dtype in _DTYPES for cache in (dtype, *_EIGHT_BITS)]
        return [
            case
            for head_size, page_size, (dtype, cache), (name, options) in product(
                _HEAD_SIZES, _PAGE_SIZES, caches, _OPTIONS.items()
            )
            if options.page_sizes is None or page_size in options.page_sizes
            if config.unsupported(
                _queries(case := Case(NAME, head_size, page_size, dtype, cache, name)), _pages(case)
            )
            is None
        ]

    def program(self, case: Case) -> Program:
        pages = _pages(case)
        num_rows = _TOKENS if _OPTIONS[case.options].decode_only else _ROWS
        args = {
            "q_tnh": _queries(case),
            "kv_pages": (pages, pages),
            "block_tables": array(jnp.int32, num_rows, 128),
            "seq_lens": array(jnp.int32, num_rows),
            "query_start_loc": array(jnp.int32, num_rows + 1),
        }
        return Program(_attend(_OPTIONS[case.options]), (args,))

    def expected(self, case: Case) -> dict[str, Expected]:
        size, item = case.size, jnp.dtype(case.cache_dtype).itemsize
        decode, prefill = config.decode_config(size), config.prefill_config(size)
        ring = functools.partial(Expected, matmuls=True, loads=True, stores=True)
        kernels = {
            "paged_decode": ring(
                stages=decode.stages,
                stage_bytes=2 * decode.block_tokens * size * item,
                least_in_flight=64 << 10,
                # Two registers, where a page takes several copies.
                most_spilled=16 if size == 256 and case.page_size > 16 else 0,
                shared_memory=decode.shared_memory(size, item),
            ),
            "paged_decode_merge": Expected(stores=True),
        }
        if not _OPTIONS[case.options].decode_only:
            kernels["paged_prefill"] = ring(
                stages=prefill.stages,
                stage_bytes=2 * prefill.block_tokens * size * item,
                shared_memory=prefill.shared_memory(size, item),
            )
        return kernels


def _attend(options: _Options) -> Callable[[dict[str, Any]], Any]:
    def attend(args: dict[str, Any]) -> Any:
        from kernels_pallas.ragged_paged_attention import mosaic_gpu

        return mosaic_gpu.ragged_paged_attention(
            **args,
            scale=0.1,
            sliding_window=1000 if options.everything else None,
            soft_cap=30.0 if options.everything else None,
            decode_only=options.decode_only,
        )

    return attend


def _queries(case: Case) -> Any:
    return array(case.dtype, _TOKENS, _KV_HEADS * _GROUP, case.size)


def _pages(case: Case) -> Any:
    return array(case.cache_dtype, 512, _KV_HEADS, case.page_size, case.size)
