"""Sizes of the Mosaic GPU attention kernels, checked against shared memory before anything is launched."""

from __future__ import annotations

import dataclasses
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
_NARROW_DTYPES = ("float8_e4m3fn", "int8")
_PAGE_SIZES = (16, 32, 64, 128)
_MAX_GROUP = 64
_OVERHEAD = 2304
"""Small arrays, scratch memory for reductions, barriers."""
_MAX_SLOTS = 32
_BARRIERS = 1024


def _check_block(name: str, block_tokens: int, stages: int | None = None) -> None:
    if block_tokens not in (64, 128):
        raise ValueError(f"{name}.block_tokens must be 64 or 128, got {block_tokens}")
    if stages is not None and stages < 2:
        raise ValueError(f"{name}.stages must be at least 2, got {stages}")


def check_shared_memory(
    name: str, used: int, where: str = "", remedy: str = "fewer stages"
) -> None:
    """Raises `ValueError` where `used` bytes, those of the kernel config `name`, are more than a thread block can have."""
    if used > SHARED_MEMORY_PER_BLOCK:
        raise ValueError(
            f"{name} needs {used} bytes of shared memory{where}; a block has {SHARED_MEMORY_PER_BLOCK}. Take {remedy}."
        )


def _check_attention_memory(name: str, used: int, head_size: int) -> None:
    where = f" at head size {head_size}"
    check_shared_memory(name, used, where, "fewer stages or a smaller block_tokens")


@dataclass(frozen=True, slots=True)
class DecodeConfig:
    """Of the kernel for a few tokens per request."""

    block_tokens: int
    """Keys per step of the loop."""
    slots: int
    """Tiles in the ring, of keys and values in turn."""
    blocks_per_core: int = 2
    """Thread blocks that run on a core at the same time: registers must allow it."""
    cores: int = 132
    """To fill; an H100 or H200 (SXM) has this many."""
    min_blocks: int = 4
    """Smallest share of a thread block, in steps."""

    def __post_init__(self) -> None:
        _check_block("DecodeConfig", self.block_tokens)
        for name, least in (("slots", 3), ("blocks_per_core", 1), ("cores", 1), ("min_blocks", 1)):
            value = getattr(self, name)
            if value < least:
                raise ValueError(f"DecodeConfig.{name} must be at least {least}, got {value}")

    def _tile_bytes(self, head_size: int, page_itemsize: int) -> int:
        return self.block_tokens * head_size * page_itemsize

    def shared_memory(self, head_size: int, columns: int, page_itemsize: int) -> int:
        """Bytes of one thread block: the ring, queries (two that come, one in use), weights, the result, a widened tile."""
        one = 2 * columns * head_size
        arrays = [2 * one, one, one, 2 * columns * self.block_tokens, 4 * columns]
        arrays.append(self.slots * self._tile_bytes(head_size, page_itemsize))
        if page_itemsize == 1:
            arrays.append(2 * self.block_tokens * head_size)
        # Each begins at a multiple of 1024 bytes; reductions exchange [4 warps, 32 lanes].
        return sum(-(-n // 1024) * 1024 for n in arrays) + 128 * min(columns, 32) + _BARRIERS

    def bytes_in_flight(self, head_size: int, page_itemsize: int) -> int:
        """Of one core, while one tile of each ring is worked on."""
        tile = self._tile_bytes(head_size, page_itemsize)
        return self.blocks_per_core * (self.slots - 1) * tile

    def check(self, head_size: int, columns: int, page_itemsize: int) -> None:
        """Raises `ValueError` when the kernel can't be launched."""
        used = self.shared_memory(head_size, columns, page_itemsize)
        _check_attention_memory("DecodeConfig", used, head_size)


@dataclass(frozen=True, slots=True)
class PrefillConfig:
    """Of the kernel for many tokens per request."""

    block_tokens: int
    stages: int
    consumers: int = 2
    """Warp groups that compute, each on its own 64 query rows; they share the ring."""
    queries_in_registers: bool = True
    """As an operand of the matmul; it halves what a block of scores reads from shared memory, and saves a tile."""
    own_result_tile: bool = True
    """Otherwise results leave through the next tile's queries, which then come later."""
    cores: int = 132
    """Thread blocks to launch; an H100 or H200 (SXM) has this many cores."""

    def __post_init__(self) -> None:
        _check_block("PrefillConfig", self.block_tokens, self.stages)
        if self.consumers not in (1, 2):
            raise ValueError(f"PrefillConfig.consumers must be 1 or 2, got {self.consumers}")
        if self.cores < 1:
            raise ValueError(f"PrefillConfig.cores must be at least 1, got {self.cores}")

    def shared_memory(self, head_size: int, itemsize: int, page_itemsize: int = 2) -> int:
        """Bytes of one thread block: the ring, the tiles that 8-bit blocks are widened into, queries and results."""
        block = 2 * self.block_tokens * head_size
        ring = self.stages * block * page_itemsize
        widened = block * itemsize if page_itemsize == 1 else 0
        rows = 1 + (not self.queries_in_registers) + self.own_result_tile
        return ring + widened + rows * self.consumers * ROWS * head_size * itemsize + _OVERHEAD

    def bytes_in_flight(self, head_size: int, page_itemsize: int = 2) -> int:
        """Of one core, while one block of the ring is worked on."""
        return 2 * (self.stages - 1) * self.block_tokens * head_size * page_itemsize

    def check(self, head_size: int, itemsize: int, page_itemsize: int = 2) -> None:
        """Raises `ValueError` when the kernel can't be launched."""
        used = self.shared_memory(head_size, itemsize, page_itemsize)
        _check_attention_memory("PrefillConfig", used, head_size)


@functools.cache
def _table() -> dict:
    path = resources.files(__package__) / "tuning.json"
    return json.loads(path.read_text())


def head_sizes() -> tuple[int, ...]:
    """The head sizes that the kernels are tuned and checked for."""
    return tuple(sorted(int(size) for size in _table()["decode"]))


def decode_config(head_size: int, columns: int, page_itemsize: int) -> DecodeConfig:
    """The tuned sizes, with as many slots as fit into shared memory.

    Args:
        columns: query heads times tokens, see `mosaic_gpu.decode_shape`.
        page_itemsize: bytes of one number in the cache.
    """
    table = _table()["decode" if page_itemsize == 2 else "decode_8bit"][str(head_size)]
    most = min(int(key) for key in table if int(key) >= columns)
    sizes = table[str(most)]
    budget = SHARED_MEMORY_PER_CORE // sizes["blocks_per_core"] - RESERVED_PER_BLOCK
    one = DecodeConfig(slots=3, **sizes)
    spare = budget - one.shared_memory(head_size, columns, page_itemsize)
    more = spare // (sizes["block_tokens"] * head_size * page_itemsize)
    return dataclasses.replace(one, slots=min(one.slots + max(more, 0), _MAX_SLOTS))


def prefill_config(head_size: int, page_itemsize: int = 2) -> PrefillConfig:
    table = _table()["prefill" if page_itemsize == 2 else "prefill_8bit"]
    return PrefillConfig(**table[str(head_size)])


def unsupported(q_tnh: Any, k_pages: Any) -> str | None:
    """Why these arrays are not for this backend, or None. Looks at shapes and dtypes only."""
    head_size, page_size = k_pages.shape[3], k_pages.shape[2]
    group = q_tnh.shape[1] // k_pages.shape[1]
    if q_tnh.dtype.name not in _DTYPES:
        return f"q_tnh has dtype {q_tnh.dtype}, not one of {_DTYPES}"
    if k_pages.dtype != q_tnh.dtype and k_pages.dtype.name not in _NARROW_DTYPES:
        return f"kv_pages have dtype {k_pages.dtype}, not q_tnh's {q_tnh.dtype} or one of {_NARROW_DTYPES}"
    if head_size not in head_sizes():
        return f"head size {head_size} is not one of {head_sizes()}"
    if page_size not in _PAGE_SIZES:
        return f"page size {page_size} is not one of {_PAGE_SIZES}"
    if group > _MAX_GROUP:
        return f"{group} query heads per kv head are more than {_MAX_GROUP}"
    return None
