"""Sizes of the Mosaic GPU grouped matmul, checked against shared memory before anything is launched."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from kernels_pallas.ragged_paged_attention.mosaic_gpu.config import (
    SHARED_MEMORY_PER_BLOCK,
    check_shared_memory,
)

ROWS = 64
"""Of one warp group's matmul (wgmma's M)."""
STEP = 64
"""Of the contracted axis: 128 bytes, the widest swizzle."""
_DTYPES = ("bfloat16", "float16")
_OUT_DTYPES = ("bfloat16", "float16", "float32")
_OVERHEAD = 2048
"""Barriers and the like."""


@dataclass(frozen=True, slots=True)
class Config:
    """Raises `ValueError` for what doesn't fit.

    columns: of the result, for which a thread block reads the matrix.
    consumers: warp groups that multiply, 64 rows each, by the same part of the matrix.
    stages: parts of rows and matrix in shared memory, of which one or two are worked on and the others on their way.
    out_bytes: of a number of the result.
    """

    columns: int
    consumers: int
    stages: int
    out_bytes: int
    cores: int = 132
    """To fill; an H100 or H200 (SXM) has this many."""

    def __post_init__(self) -> None:
        for name, accepted in (("columns", (64, 128)), ("consumers", (1, 2))):
            if getattr(self, name) not in accepted:
                raise ValueError(
                    f"Config.{name} must be one of {accepted}, got {getattr(self, name)}"
                )
        if self.stages < 3:
            raise ValueError(f"Config.stages must be at least 3, got {self.stages}")
        check_shared_memory("Config", self.shared_memory)

    @property
    def tile_rows(self) -> int:
        return self.consumers * ROWS

    @property
    def stage_bytes(self) -> int:
        return (self.tile_rows + self.columns) * STEP * 2

    @property
    def shared_memory(self) -> int:
        """Bytes of a thread block: the ring, and results on their way out."""
        results = self.tile_rows * self.columns * self.out_bytes
        return self.stages * self.stage_bytes + results + _OVERHEAD


def config_for(num_rows: int, num_groups: int, num_outputs: int, out_dtype: Any) -> Config:
    """Two consumers where an even share of the rows is more than one has; as many stages as fit, up to eight."""
    columns = 128 if num_outputs % 128 == 0 else 64
    consumers = 2 if num_rows > ROWS * num_groups else 1
    out_bytes = jnp.dtype(out_dtype).itemsize
    least = Config(columns, consumers, 3, out_bytes)
    spare = SHARED_MEMORY_PER_BLOCK - least.shared_memory
    return Config(columns, consumers, min(3 + spare // least.stage_bytes, 8), out_bytes)


def unsupported(rows_mk: Any, weights_gnk: Any, out_dtype: Any) -> str | None:
    """Why these arrays are not for this backend, or None. Looks at shapes and dtypes only."""
    _, num_outputs, size = weights_gnk.shape
    if rows_mk.dtype.name not in _DTYPES:
        return f"rows_mk has dtype {rows_mk.dtype}, not one of {_DTYPES}"
    if jnp.dtype(out_dtype).name not in _OUT_DTYPES:
        return f"the result has dtype {jnp.dtype(out_dtype)}, not one of {_OUT_DTYPES}"
    if size % STEP:
        return f"K = {size} is not a multiple of {STEP}"
    if num_outputs % 64:
        return f"N = {num_outputs} is not a multiple of 64"
    return None
