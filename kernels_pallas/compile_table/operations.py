"""The operations that have kernels for Hopper, by name."""

from __future__ import annotations

from kernels_pallas.compile_table import attention, grouped, mla, norm, quantized, rope
from kernels_pallas.compile_table.case import Case, Operation

OPERATIONS: dict[str, Operation] = {
    attention.NAME: attention.RaggedPagedAttention(),
    grouped.NAME: grouped.GroupedMatmul(),
    mla.NAME: mla.MlaAttention(),
    norm.NAME: norm.AddRmsNorm(),
    quantized.NAME: quantized.QuantizedMatmul(),
    rope.NAME: rope.RopeKVCacheUpdate(),
}


def claims() -> list[Case]:
    """Every combination of every operation."""
    return [case for operation in OPERATIONS.values() for case in operation.claims()]
