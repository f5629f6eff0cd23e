"""Claims of `mla_attention`: whatever its `mosaic_gpu_config.unsupported` has nothing against."""

from __future__ import annotations

import functools
from itertools import product
from typing import Any

import jax.numpy as jnp

from kernels_pallas.compile_table.case import Case, Expected, Program, array
from kernels_pallas.mla_attention import mosaic_gpu_config as config

NAME = "mla_attention"

_TOKENS = 64
_DTYPES = ("bfloat16", "float16", "float32")
_PAGE_SIZES = [1 << n for n in range(11)]
_OPTIONS = {
    "128 heads, decode only": (128, {"decode_only": True}),
    "16 heads, decode only, lse": (16, {"decode_only": True, "return_lse": True}),
    "16 heads, mixed, lse": (16, {"return_lse": True}),
}
"""Query heads (all, and a share of them) and options of the call."""


class MlaAttention:
    def claims(self) -> list[Case]:
        size = config.RANK + config.ROPE
        return [
            case
            for page_size, dtype, options in product(_PAGE_SIZES, _DTYPES, _OPTIONS)
            if config.unsupported(
                *_arrays(case := Case(NAME, size, page_size, dtype, dtype, options))[:3]
            )
            is None
        ]

    def program(self, case: Case) -> Program:
        from kernels_pallas.mla_attention import mosaic_gpu

        _, options = _OPTIONS[case.options]
        attend = functools.partial(mosaic_gpu.mla_attention, scale=0.1, **options)
        return Program(attend, _arrays(case))

    def expected(self, case: Case) -> dict[str, Expected]:
        tuned = config.tuned_config()
        return {
            "mla_attend": Expected(
                matmuls=True,
                loads=True,
                stages=tuned.stages,
                stage_bytes=config.BLOCK_TOKENS * case.size * 2,
                stages_in_use=2,
                least_in_flight=64 << 10,
                read_by_threads=("scores_s[",),
                shared_memory=tuned.shared_memory,
            ),
            "mla_merge": Expected(),
        }


def _arrays(case: Case) -> tuple[Any, ...]:
    num_heads, options = _OPTIONS[case.options]
    num_rows = _TOKENS if options.get("decode_only") else 16
    return (
        array(case.dtype, _TOKENS, num_heads, config.RANK),
        array(case.dtype, _TOKENS, num_heads, config.ROPE),
        array(case.dtype, 512, case.page_size, case.size),
        array(jnp.int32, num_rows, 128),
        array(jnp.int32, num_rows),
        array(jnp.int32, num_rows + 1),
    )
