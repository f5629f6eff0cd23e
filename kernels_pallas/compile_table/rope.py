"""Claims of `rope_kv_cache_update`: the head sizes, page sizes and caches of attention, as far as the kernel's own config
takes them."""

from __future__ import annotations

import functools
from itertools import product
from typing import Any

import jax.numpy as jnp

from kernels_pallas.compile_table import attention
from kernels_pallas.compile_table.case import Case, Expected, Program, array
from kernels_pallas.rope_kv_cache_update.mosaic_gpu_config import config_for

NAME = "rope_kv_cache_update"

_NUM_TOKENS = 64
_HEADS = {"8 x 4 heads": (8, 4), "2 x 8 heads": (2, 8)}
"""kv heads and query heads of each: the whole of a small model, a share of a large one."""

_OPTIONS = {
    "8 x 4 heads": None,
    "8 x 4 heads, norm": (16,),
    "8 x 4 heads, half rotated": (32,),
    "8 x 4 heads, norm, half rotated": (64,),
    "2 x 8 heads": (128,),
}
"""And the page sizes where each is compiled: they change the address of a copy and nothing else, so all of them once."""


class RopeKVCacheUpdate:
    def claims(self) -> list[Case]:
        attended = attention.RaggedPagedAttention().claims()
        sizes = sorted({(c.size, c.page_size) for c in attended})
        caches = sorted({(c.dtype, c.cache_dtype) for c in attended})
        return [
            case
            for (size, page_size), (dtype, cache), (options, page_sizes) in product(
                sizes, [*caches, ("float32", "float32")], _OPTIONS.items()
            )
            if page_sizes is None or page_size in page_sizes
            if self._takes(case := Case(NAME, size, page_size, dtype, cache, options))
        ]

    def _takes(self, case: Case) -> bool:
        qkv, pages, _, cos, _, q_norm, *_ = self._args(case)
        try:
            config_for(qkv, pages, cos, q_norm)
        except ValueError:
            return False
        return True

    def _args(self, case: Case) -> tuple[Any, ...]:
        heads, _, extras = case.options.partition(", ")
        num_kv_heads, group = _HEADS[heads]
        size = case.size
        pages = array(case.cache_dtype, 512, num_kv_heads, case.page_size, size)
        angles = array(
            jnp.float32, _NUM_TOKENS, size // 4 if "half rotated" in extras else size // 2
        )
        norm = array(case.dtype, size) if "norm" in extras else None
        qkv = array(case.dtype, _NUM_TOKENS, num_kv_heads, group + 2, size)
        scale = array(jnp.float32, num_kv_heads)
        scales = None if case.cache_dtype == case.dtype else (scale, scale)
        slots = array(jnp.int32, _NUM_TOKENS)
        return qkv, (pages, pages), slots, angles, angles, norm, norm, scales

    def program(self, case: Case) -> Program:
        from kernels_pallas.rope_kv_cache_update import mosaic_gpu

        update = functools.partial(
            mosaic_gpu.rope_kv_cache_update, norm_eps=1e-5, norm_weight_offset=0.0
        )
        return Program(update, self._args(case), donate_argnums=(1,))

    def expected(self, case: Case) -> dict[str, Expected]:
        qkv, pages, _, cos, _, q_norm, *_ = self._args(case)
        used = config_for(qkv, pages, cos, q_norm).shared_memory_bytes
        return {NAME: Expected(loads=True, stores=True, shared_memory=used)}
