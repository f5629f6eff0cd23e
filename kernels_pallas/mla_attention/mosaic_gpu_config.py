"""Sizes of the Mosaic GPU kernel for latent attention, checked against shared memory before anything is launched."""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from importlib import resources
from typing import Any

from kernels_pallas.ragged_paged_attention.mosaic_gpu.config import check_shared_memory

RANK, ROPE = 512, 64
"""Of the latent and of the rotated part; the only ones that the kernel takes."""
WARP_GROUPS = 2
"""Each has half of the columns of both."""
RANK_HALF, ROPE_HALF = RANK // WARP_GROUPS, ROPE // WARP_GROUPS
ROWS = 64
"""Query tokens times heads of a tile: the rows of one warp group's matmul."""
BLOCK_TOKENS = 32
"""Keys per step of the loop: two of the ring's blocks are worked on at a time, and blocks of 64 would not leave room to
load more meanwhile."""
TILE_COLUMNS = 32
"""Of swizzled tiles in shared memory. Mosaic's wgmma contracts over as many rows as tiles have columns, here the keys."""
QUERY_TILE = 64
"""Columns of the parts that queries are cut into."""
_QUERY_TILES = RANK_HALF // QUERY_TILE
_DTYPES = ("bfloat16", "float16")
_PAGE_SIZES = (16, 32, 64, 128)
_OVERHEAD = 3072
"""Small arrays, scratch memory for reductions, barriers."""


@dataclass(frozen=True, slots=True)
class MlaConfig:
    """Of the kernel, for caches of 512 + 64 columns of 16-bit numbers. Raises `ValueError` for what can't run."""

    stages: int
    """Blocks in the ring; two are worked on at a time."""
    query_tiles: int
    """Of the four parts of 64 columns of a warp group's queries, those that stay in registers."""
    cores: int = 132
    """To fill; an H100 or H200 (SXM) has this many."""
    start_blocks: int = 6
    """What starting on a tile of queries and writing its result costs, in blocks."""
    snap_blocks: int = 4
    """A tile's context is not split this close to its ends."""
    min_blocks: int = 12
    """Least work of a thread block, `start_blocks` included."""

    def __post_init__(self) -> None:
        if self.stages < 3:
            raise ValueError(f"MlaConfig.stages must be at least 3, got {self.stages}")
        if not 0 <= self.query_tiles < _QUERY_TILES:
            raise ValueError(
                f"MlaConfig.query_tiles must be 0 to {_QUERY_TILES - 1}, got {self.query_tiles}"
            )
        for name in ("cores", "snap_blocks", "min_blocks"):
            if (value := getattr(self, name)) < 1:
                raise ValueError(f"MlaConfig.{name} must be at least 1, got {value}")
        if self.start_blocks < 0:
            raise ValueError(
                f"MlaConfig.start_blocks must not be negative, got {self.start_blocks}"
            )
        check_shared_memory("MlaConfig", self.shared_memory)

    @property
    def staged_tiles(self) -> int:
        """Tiles of a warp group's queries that lie in shared memory."""
        return _QUERY_TILES - self.query_tiles

    @property
    def shared_memory(self) -> int:
        """Bytes of a thread block: the ring, queries, exchanged scores."""
        ring = self.stages * BLOCK_TOKENS * (RANK + ROPE) * 2
        queries = WARP_GROUPS * ROWS * (self.staged_tiles * QUERY_TILE + ROPE_HALF) * 2
        scores = 2 * WARP_GROUPS * ROWS * BLOCK_TOKENS * 4
        return ring + queries + scores + _OVERHEAD

    @property
    def bytes_in_flight(self) -> int:
        """Of a core, which holds one thread block, while two blocks of the ring are worked on."""
        return (self.stages - 2) * BLOCK_TOKENS * (RANK + ROPE) * 2


@functools.cache
def tuned_config() -> MlaConfig:
    path = resources.files(__package__) / "mosaic_gpu_tuning.json"
    return MlaConfig(**json.loads(path.read_text())["config"])


def heads_per_tile(num_heads: int) -> int:
    """Query heads that share a tile of 64 rows: the largest divisor that is a multiple of 8, the rows of a copy."""
    return next(n for n in range(ROWS, 0, -8) if num_heads % n == 0)


def unsupported(q_latent_tnl: Any, q_rope_tnr: Any, latent_pages: Any) -> str | None:
    """Why these arrays are not for this backend, or None. Looks at shapes and dtypes only."""
    num_heads, rank = q_latent_tnl.shape[1:]
    rope, page_size = q_rope_tnr.shape[2], latent_pages.shape[1]
    if q_latent_tnl.dtype.name not in _DTYPES:
        return f"q_latent_tnl has dtype {q_latent_tnl.dtype}, not one of {_DTYPES}"
    if (rank, rope) != (RANK, ROPE):
        return f"latent rank and rotated size {rank} + {rope} are not {RANK} + {ROPE}"
    if page_size not in _PAGE_SIZES:
        return f"page size {page_size} is not one of {_PAGE_SIZES}"
    if num_heads % 8 != 0:
        return f"{num_heads} query heads are not a multiple of 8"
    return None
