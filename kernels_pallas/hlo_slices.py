"""Slices that XLA hands to a kernel where they lie in a larger buffer, instead of copying them out.

That saves a copy, and costs two things that only show on a GPU: Mosaic GPU refuses to launch a kernel with an operand that
does not start at a multiple of 256 bytes, and a kernel that updates an operand in place may no longer do so.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from kernels_pallas.hlo_costs import aliases
from kernels_pallas.hlo_text import Computation, Instruction, arrays_of, parse_module

OPERAND_ALIGNMENT = 256
"""Bytes that an operand of a Mosaic GPU kernel must be aligned to; what XLA allocates is."""


@dataclass(frozen=True, slots=True)
class SlicedOperand:
    fusion: str
    """XLA's name for the call and its slices."""
    source: str
    """Where in the traced function the call comes from."""
    operand: int
    offset: int | None
    """Bytes from the start of the buffer; None when only the running program knows."""
    updates_in_place: bool
    """Whether the call shares any operand's buffer with a result."""

    @property
    def is_safe(self) -> bool:
        is_aligned = self.offset is not None and self.offset % OPERAND_ALIGNMENT == 0
        return is_aligned and not self.updates_in_place


def sliced_operands(text: str) -> list[SlicedOperand]:
    """Of every custom call that an optimised HLO module wraps up with slices."""
    module = parse_module(text)
    found = []
    for computation in module.computations.values():
        for fusion in computation.instructions.values():
            called = fusion.called("calls") if fusion.opcode == "fusion" else None
            if called is not None:
                found += _of_fusion(fusion.name, module.computations[called])
    return found


def _of_fusion(name: str, fused: Computation) -> list[SlicedOperand]:
    found = []
    for call in fused.instructions.values():
        for operand, source in enumerate(call.operands if call.custom_call_target else ()):
            value = fused.instructions[source]
            while value.opcode in ("bitcast", "reshape"):
                value = fused.instructions[value.operands[0]]
            if value.opcode in ("slice", "dynamic-slice"):
                offset = _offset(fused, value) if value.opcode == "slice" else None
                in_place = bool(aliases(call))
                found.append(SlicedOperand(name, call.op_name, operand, offset, in_place))
    return found


def _offset(computation: Computation, value: Instruction) -> int:
    (whole,) = arrays_of(computation.instructions[value.operands[0]].shape)
    ranges = re.search(r"\bslice={([^}]*)}", value.attributes)
    assert ranges is not None, value.attributes
    starts = [int(n) for n in re.findall(r"\[(\d+):", ranges[1])]
    strides = [math.prod(whole.dims[i + 1 :]) for i in range(len(whole.dims))]
    elements = sum(start * stride for start, stride in zip(starts, strides, strict=True))
    return elements * whole.bits // 8
