"""Sizes of the Mosaic GPU attention kernels, checked against shared memory before anything is launched."""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from importlib import resources
from typing import Any

SHARED_MEMORY_PER_BLOCK = 232_448
"""Bytes that one thread block can ask for on compute capability 9.0."""

SHARED_MEMORY_PER_CORE = 233_472
RESERVED_PER_BLOCK = 1024
ROWS = 64
_DTYPES = ("bfloat16", "float16")
_PAGE_SIZES = (16, 32, 64, 128)
_MAX_GROUP = 64
_OVERHEAD = 2304
"""Small arrays, scratch memory for reductions, barriers."""


def _check_block(name: str, block_tokens: int, stages: int) -> None:
    if block_tokens not in (64, 128):
        raise ValueError(f"{name}.block_tokens must be 64 or 128, got {block_tokens}")
    if stages < 2:
        raise ValueError(f"{name}.stages must be at least 2, got {stages}")


def _check_shared_memory(name: str, used: int, head_size: int) -> None:
    if used > SHARED_MEMORY_PER_BLOCK:
        raise ValueError(
            f"{name} needs {used} bytes of shared memory at head size {head_size}; "
            f"a block has {SHARED_MEMORY_PER_BLOCK}. Take fewer stages or a smaller block_tokens."
        )


@dataclass(frozen=True, slots=True)
class DecodeConfig:
    """Of the kernel for one token per request."""

    block_tokens: int
    """Keys per step of the loop."""
    stages: int
    """Blocks of keys and values in the ring."""
    cores: int = 132
    """To fill; an H100 or H200 (SXM) has this many."""
    items_per_core: int = 4
    """Work items to aim for, over all kv heads: with fewer the last ones leave cores idle."""
    min_blocks: int = 4
    """An item's fixed cost is about that of two blocks."""

    def __post_init__(self) -> None:
        _check_block("DecodeConfig", self.block_tokens, self.stages)
        for name in ("cores", "items_per_core", "min_blocks"):
            value = getattr(self, name)
            if value < 1:
                raise ValueError(f"DecodeConfig.{name} must be at least 1, got {value}")

    def target_items(self, num_kv_heads: int) -> int:
        return -(-self.cores * self.items_per_core // num_kv_heads)

    def keeps_queries(self, head_size: int) -> bool:
        """In shared memory; smaller ones fit in registers beside the accumulator, for a second block per core."""
        return head_size > 128

    def shared_memory(self, head_size: int, itemsize: int) -> int:
        """Bytes of one thread block: the ring, the queries, the log-sum-exps."""
        ring = 2 * self.stages * self.block_tokens * head_size * itemsize
        queries = ROWS * head_size * itemsize if self.keeps_queries(head_size) else 0
        return ring + queries + _OVERHEAD

    def bytes_in_flight(self, head_size: int, itemsize: int) -> int:
        """Of one core, while one block of each ring is worked on."""
        blocks = SHARED_MEMORY_PER_CORE // (
            self.shared_memory(head_size, itemsize) + RESERVED_PER_BLOCK
        )
        return blocks * 2 * (self.stages - 1) * self.block_tokens * head_size * itemsize

    def check(self, head_size: int, itemsize: int) -> None:
        """Raises `ValueError` when the kernel can't be launched."""
        _check_shared_memory("DecodeConfig", self.shared_memory(head_size, itemsize), head_size)


@dataclass(frozen=True, slots=True)
class PrefillConfig:
    """Of the kernel for many tokens per request."""

    block_tokens: int
    stages: int
    consumers: int = 2
    """Warp groups that compute, each on its own 64 query rows; they share the ring."""

    def __post_init__(self) -> None:
        _check_block("PrefillConfig", self.block_tokens, self.stages)
        if self.consumers not in (1, 2):
            raise ValueError(f"PrefillConfig.consumers must be 1 or 2, got {self.consumers}")

    def shared_memory(self, head_size: int, itemsize: int) -> int:
        """Bytes of one thread block: the ring, queries and results."""
        ring = 2 * self.stages * self.block_tokens * head_size * itemsize
        return ring + 2 * self.consumers * ROWS * head_size * itemsize + _OVERHEAD

    def bytes_in_flight(self, head_size: int, itemsize: int) -> int:
        """Of one core, while one block of the ring is worked on."""
        return 2 * (self.stages - 1) * self.block_tokens * head_size * itemsize

    def check(self, head_size: int, itemsize: int) -> None:
        """Raises `ValueError` when the kernel can't be launched."""
        _check_shared_memory("PrefillConfig", self.shared_memory(head_size, itemsize), head_size)


@functools.cache
def _table() -> dict:
    path = resources.files(__package__) / "mosaic_gpu_tuning.json"
    return json.loads(path.read_text())


def head_sizes() -> tuple[int, ...]:
    """The head sizes that the kernels are tuned and checked for."""
    return tuple(sorted(int(size) for size in _table()["decode"]))


def decode_config(head_size: int) -> DecodeConfig:
    return DecodeConfig(**_table()["decode"][str(head_size)])


def prefill_config(head_size: int) -> PrefillConfig:
    return PrefillConfig(**_table()["prefill"][str(head_size)])


def unsupported(
    q_tnh: Any,
    k_pages: Any,
    *,
    causal: bool = True,
    has_sinks: bool = False,
    return_lse: bool = False,
) -> str | None:
    """Why this call is not for this backend, or None. Looks at shapes and dtypes only."""
    head_size, page_size = k_pages.shape[3], k_pages.shape[2]
    group = q_tnh.shape[1] // k_pages.shape[1]
    if q_tnh.dtype.name not in _DTYPES:
        return f"q_tnh has dtype {q_tnh.dtype}, not one of {_DTYPES}"
    if head_size not in head_sizes():
        return f"head size {head_size} is not one of {head_sizes()}"
    if page_size not in _PAGE_SIZES:
        return f"page size {page_size} is not one of {_PAGE_SIZES}"
    if group > _MAX_GROUP:
        return f"{group} query heads per kv head are more than {_MAX_GROUP}"
    if k_pages.dtype != q_tnh.dtype:
        return f"kv_pages have dtype {k_pages.dtype}, not q_tnh's {q_tnh.dtype}"
    if not causal:
        return "causal is False"
    if has_sinks:
        return "there are sinks"
    if return_lse:
        return "return_lse is set"
    return None
