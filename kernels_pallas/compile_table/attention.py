"""Claims of `ragged_paged_attention`: whatever `mosaic_gpu.config.unsupported` has nothing against."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from typing import Any

import jax.numpy as jnp

from kernels_pallas.compile_table.case import Case, Expected, Program, array
from kernels_pallas.ragged_paged_attention.mosaic_gpu import config

NAME = "ragged_paged_attention"

_KV_HEADS = 8
_ROWS, _TOKENS = 16, 256
_DTYPES = ("bfloat16", "float16", "float32")
_EIGHT_BITS = ("float8_e4m3fn", "float8_e5m2", "int8")
_HEAD_SIZES = range(8, 513, 8)
_PAGE_SIZES = [1 << n for n in range(11)]


@dataclass(frozen=True, slots=True)
class _Options:
    group: int = 4
    """Query heads per kv head."""
    decode_only: bool = False
    everything: bool = False
    """Sliding window, soft cap, sinks, log-sum-exps."""
    causal: bool = True
    page_sizes: tuple[int, ...] | None = None
    """Where the option adds nothing to the page sizes that others are compiled for, only these."""


_OPTIONS = {
    "mixed, window, cap, sinks, lse": _Options(everything=True),
    "mixed": _Options(page_sizes=(128,)),
    "mixed, not causal, lse": _Options(causal=False, page_sizes=(32,)),
    "mixed, 8 heads, window, cap, sinks, lse": _Options(group=8, everything=True, page_sizes=(16,)),
    "decode only": _Options(decode_only=True, page_sizes=(16, 64)),
    "decode only, 8 heads, window, cap, sinks, lse": _Options(
        group=8, decode_only=True, everything=True, page_sizes=(64,)
    ),
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
            if _takes(case := Case(NAME, head_size, page_size, dtype, cache, name))
        ]

    def program(self, case: Case) -> Program:
        options = _OPTIONS[case.options]
        pages = _pages(case)
        num_rows = _TOKENS if options.decode_only else _ROWS
        args = {
            "q_tnh": _queries(case),
            "kv_pages": (pages, pages),
            "block_tables": array(jnp.int32, num_rows, 128),
            "seq_lens": array(jnp.int32, num_rows),
            "query_start_loc": array(jnp.int32, num_rows + 1),
        }
        if case.cache_dtype in _EIGHT_BITS:
            args["kv_scales"] = (array(jnp.float32, _KV_HEADS),) * 2
        if options.everything:
            args["sinks"] = array(jnp.float32, _KV_HEADS * options.group)
        return Program(_attend(options), (args,))

    def expected(self, case: Case) -> dict[str, Expected]:
        from kernels_pallas.ragged_paged_attention.mosaic_gpu.decode_shape import (
            MAX_TOKENS,
            DecodeShape,
        )

        options = _OPTIONS[case.options]
        size = case.size
        item, page_item = (jnp.dtype(dtype).itemsize for dtype in (case.dtype, case.cache_dtype))
        most = 1 if options.decode_only else MAX_TOKENS
        columns = DecodeShape.of(options.group, size, most).columns
        decode = config.decode_config(size, columns, page_item)
        kernels = {
            "paged_decode": Expected(
                matmuls=True,
                loads=True,
                stores=True,
                stages=decode.slots,
                stage_bytes=decode.block_tokens * size * page_item,
                least_in_flight=64 << 10,
                shared_memory=decode.shared_memory(size, columns, page_item),
            ),
        }
        if options.decode_only:
            kernels["paged_decode_merge"] = Expected()
        else:
            prefill = config.prefill_config(size, page_item)
            kernels["paged_prefill"] = Expected(
                matmuls=True,
                loads=True,
                stores=True,
                stages=prefill.stages,
                stage_bytes=2 * prefill.block_tokens * size * page_item,
                # A block of 8-bit numbers keeps the matmuls busy for twice as long as its bytes say.
                least_in_flight=64 << 10 if page_item == item else 0,
                shared_memory=prefill.shared_memory(size, item, page_item),
            )
        return kernels


def _attend(options: _Options) -> Callable[[dict[str, Any]], Any]:
    def attend(args: dict[str, Any]) -> Any:
        from kernels_pallas.ragged_paged_attention.mosaic_gpu.attention import (
            ragged_paged_attention,
        )

        return ragged_paged_attention(
            **args,
            scale=0.1,
            sliding_window=1000 if options.everything else None,
            soft_cap=30.0 if options.everything else None,
            causal=options.causal,
            return_lse=options.everything or not options.causal,
            decode_only=options.decode_only,
        )

    return attend


def _takes(case: Case) -> bool:
    return config.unsupported(_queries(case), _pages(case)) is None


def _queries(case: Case) -> Any:
    return array(case.dtype, _TOKENS, _KV_HEADS * _OPTIONS[case.options].group, case.size)


def _pages(case: Case) -> Any:
    return array(case.cache_dtype, 512, _KV_HEADS, case.page_size, case.size)
