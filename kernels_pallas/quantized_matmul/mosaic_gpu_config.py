"""Sizes of the Mosaic GPU quantized matmul, checked against shared memory before anything is launched."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from kernels_pallas.quantized_matmul.format import WeightFormat
from kernels_pallas.ragged_paged_attention.mosaic_gpu.config import (
    SHARED_MEMORY_PER_BLOCK,
    check_shared_memory,
)

ROWS = 64
"""Of the weight, for one warp group's matmul (wgmma's M)."""
STEP = 128
"""Of the contracted axis, one stage of the ring."""
GROUPS = 8
"""Whose scales are read at once, while the groups before are multiplied."""
PACK_BLOCK = 64
MAX_ROWS = 512
"""Of x, for 16-bit operands: beyond, a pass that dequantizes the weight costs less than what cuBLAS gains on this kernel,
by counting bytes and products."""
_GROUP_SIZES = (32, 64, 128)
_DTYPES = ("bfloat16", "float16")
_OUT_DTYPES = ("bfloat16", "float16", "float32")
_SCALES = ("bfloat16", "float16", "float32")
_COLUMNS = (8, 16, 32, 64, 128)
_MOST_STAGES = 16
_OVERHEAD = 2048
"""Barriers and scratch memory of reductions."""


@dataclass(frozen=True, slots=True)
class Operands:
    """What of a format the kernel is compiled for."""

    codes: str
    group_size: int | None
    offsets: bool
    """Whether the groups' scaled values have something added."""
    native: bool
    """8-bit numbers on both sides."""

    @classmethod
    def of(cls, format: WeightFormat) -> Operands:
        offsets = format.zeros or format.minima is not None
        if format.codes == "uint4":
            offsets = offsets or format.zero != 8
        return cls(format.codes, format.group_size, offsets, format.activation is not None)

    @property
    def bits(self) -> int:
        return 4 if self.codes == "uint4" else 8

    @property
    def groups_per_step(self) -> int:
        return 1 if self.group_size is None else STEP // self.group_size

    @property
    def sums(self) -> bool:
        """Whether something of x is loaded for each group: its sum or its scale."""
        return self.group_size is not None and (self.offsets or self.native)

    @property
    def scaled_after(self) -> bool:
        """Whether the kernel's result is multiplied by the scales of the rows of x."""
        return self.native and self.group_size is None

    @property
    def unit(self) -> int:
        """Steps that the contracted axis can be cut at multiples of."""
        return GROUPS if self.group_size is None else GROUPS * self.group_size // STEP

    @property
    def x_bytes(self) -> int:
        return 1 if self.native else 2


@dataclass(frozen=True, slots=True)
class Config:
    """Raises `ValueError` for what doesn't fit.

    columns: rows of x that a part of the weight is multiplied by at a time (wgmma's N).
    consumers: warp groups that multiply, each 64 rows of the weight by the same part of x.
    stages: parts of weight and x in shared memory, of which one is worked on and the others on their way.
    parts: of the contracted axis, whose sums are added up after the kernel.
    out_bytes: of a number that the kernel writes.
    """

    columns: int
    consumers: int
    stages: int
    parts: int
    out_bytes: int
    operands: Operands
    cores: int = 132
    """To fill; an H100 or H200 (SXM) has this many."""

    def __post_init__(self) -> None:
        for name, accepted in (("columns", _COLUMNS), ("consumers", (1, 2))):
            if getattr(self, name) not in accepted:
                raise ValueError(
                    f"Config.{name} must be one of {accepted}, got {getattr(self, name)}"
                )
        for name, least in (("stages", 2), ("parts", 1), ("cores", 1)):
            if getattr(self, name) < least:
                raise ValueError(
                    f"Config.{name} must be at least {least}, got {getattr(self, name)}"
                )
        check_shared_memory("Config", self.shared_memory)

    @property
    def tile_rows(self) -> int:
        return self.consumers * ROWS

    @property
    def stage_bytes(self) -> int:
        weight = self.tile_rows * STEP * self.operands.bits // 8
        return weight + self.columns * STEP * self.operands.x_bytes

    @property
    def shared_memory(self) -> int:
        """Bytes of a thread block: the ring, scales of two times `GROUPS` groups, results on their way out."""
        sums = 4 * self.columns * self.operands.groups_per_step * self.operands.sums
        arrays = [self.stages * self.stage_bytes, self.stages * sums]
        arrays.append(self.tile_rows * self.columns * self.out_bytes)
        if self.operands.group_size is not None:
            arrays += [2 * GROUPS * self.tile_rows * 4] * (1 + self.operands.offsets)
        return sum(-(-n // 1024) * 1024 for n in arrays) + _OVERHEAD


def config_for(
    num_rows: int, num_outputs: int, size: int, operands: Operands, out_dtype: Any
) -> Config:
    """As many parts as keep the cores busy for the shortest time, and as many stages as fit, up to sixteen."""
    # More would spill: sums of a group's products stand beside those of all, and small groups have operands of several.
    widest = {None: 128, STEP: 64}.get(operands.group_size, 32)
    columns = next((n for n in _COLUMNS if n >= num_rows), widest)
    columns = min(columns, widest)
    small_groups = operands.group_size is not None and operands.group_size < STEP
    # A single consumer has half as many threads to share the registers with.
    alone = num_outputs % (2 * ROWS) != 0 or (small_groups and columns > 16)
    consumers = 1 if alone else 2
    units = -(-size // (STEP * operands.unit))
    tiles = num_outputs // (consumers * ROWS) * -(-num_rows // columns)
    cores = Config.__dataclass_fields__["cores"].default

    def time(parts: int) -> float:
        """In units; an item's beginning and end, and a part's sum, are a quarter of one."""
        return -(-tiles * parts // cores) * (-(-units // parts) + 0.25)

    parts = min(range(1, min(units, 16) + 1), key=time)
    in_full = parts == 1 and not operands.scaled_after
    out_bytes = jnp.dtype(out_dtype).itemsize if in_full else 4
    least = Config(columns, consumers, 2, parts, out_bytes, operands)
    spare = SHARED_MEMORY_PER_BLOCK - least.shared_memory
    sums = 4 * columns * operands.groups_per_step * operands.sums
    stages = min(2 + (spare - 1024) // (least.stage_bytes + sums), _MOST_STAGES)
    return Config(columns, consumers, stages, parts, out_bytes, operands)


def unsupported(
    x_mk: Any, shape: tuple[int, int], format: WeightFormat, out_dtype: Any
) -> str | None:
    """Why these arrays are not for this backend, or None. Looks at shapes and dtypes only."""
    num_outputs, size = shape
    if x_mk.dtype.name not in _DTYPES:
        return f"x_mk has dtype {x_mk.dtype}, not one of {_DTYPES}"
    if jnp.dtype(out_dtype).name not in _OUT_DTYPES:
        return f"the result has dtype {jnp.dtype(out_dtype)}, not one of {_OUT_DTYPES}"
    if format.codes not in ("uint4", "int8", "e4m3"):
        return f"the weight's codes are {format.codes}, not uint4, int8 or e4m3"
    if format.codes == "e4m3" and format.activation is None and x_mk.dtype != jnp.float16:
        return f"the weight's codes are e4m3 for x of {x_mk.dtype}, which Hopper converts to float16 only"
    if format.scales not in _SCALES:
        return f"the weight's scales are {format.scales}, not one of {_SCALES}"
    group_size = format.group_size
    if group_size is None and format.codes == "uint4":
        return "the weight's codes are uint4 without groups"
    if group_size is not None and group_size not in _GROUP_SIZES:
        return f"the weight's groups have {group_size} elements, not one of {_GROUP_SIZES} or a row"
    if format.codes == "uint4" and format.block != PACK_BLOCK:
        return f"the weight's codes are packed in blocks of {format.block}, not {PACK_BLOCK}"
    if format.codes == "int8" and (format.zero or format.zeros):
        return "the weight has codes of int8 with a zero"
    if format.activation is not None and group_size not in (None, STEP):
        return f"activations are quantized in groups of {group_size}, not {STEP} or a row"
    if format.activation == "int8" and group_size is not None:
        return "activations are quantized to int8 in groups"
    if format.activation is None and x_mk.shape[0] > MAX_ROWS:
        return f"x_mk has {x_mk.shape[0]} rows, more than {MAX_ROWS}"
    if size % STEP:
        return f"K = {size} is not a multiple of {STEP}"
    if num_outputs % ROWS:
        return f"N = {num_outputs} is not a multiple of {ROWS}"
    if group_size is not None and (size // group_size < GROUPS or size // group_size % 2):
        return (
            f"the weight has {size // group_size} groups in a row, not an even number from {GROUPS}"
        )
    return None
