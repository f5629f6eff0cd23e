"""FLOPs and bytes of one instruction of compiled HLO.

Bytes follow what a kernel has to move: every operand and result once, fused operations not at all. Two exceptions
keep indexed access honest: a gather or slice counts what it takes out, and an update in place (scatter,
dynamic-update-slice) counts what it writes, not the array that it writes into.
"""

from __future__ import annotations

import math
import re

from kernels_pallas.hlo_text import (
    Array,
    Computation,
    HloModule,
    Instruction,
    arrays_of,
    num_bytes,
)

PASS_THROUGH = {"bitcast", "get-tuple-element", "opt-barrier"}
"""Names for a value that already exists."""

_UNARY = {"bitcast", "convert", "copy", "negate", "reshape", "transpose"}
_TAKES_PART = {"gather", "slice", "dynamic-slice"}
UPDATES_IN_PLACE = {"scatter", "dynamic-update-slice"}


def flops(module: HloModule, instruction: Instruction) -> int:
    """2 per multiply-add of the matmuls that the instruction holds, also inside of fusions and library calls."""
    computation = _computation_of(module, instruction)
    if computation is not None:
        return sum(
            _dot_flops(computation, inner) + flops(module, inner)
            for inner in computation.instructions.values()
        )
    return 0


def standalone_flops(module: HloModule, computation: Computation, instruction: Instruction) -> int:
    """`flops` of an instruction that a computation launches, a bare dot or library call included."""
    return flops(module, instruction) + _dot_flops(computation, instruction)


def _dot_flops(computation: Computation, instruction: Instruction) -> int:
    if instruction.opcode in ("dot", "scaled-dot"):
        contracted = instruction.dimensions("lhs_contracting_dims")
    elif (instruction.custom_call_target or "").startswith("__cublas"):
        match = re.search(r'"lhs_contracting_dimensions":\[([^\]]*)\]', instruction.attributes)
        contracted = tuple(int(d) for d in re.findall(r"\d+", match[1])) if match else ()
    else:
        return 0
    lhs = computation.instructions[instruction.operands[0]].shape
    (lhs_array, *_), (result, *_) = arrays_of(lhs), arrays_of(instruction.shape)
    return 2 * result.size * math.prod(lhs_array.dims[d] for d in contracted)


def bytes_read(
    module: HloModule, computation: Computation, instruction: Instruction, operand: int
) -> int:
    """Bytes that the instruction reads of its operand number `operand`."""
    source = computation.instructions[instruction.operands[operand]]
    if instruction.opcode in UPDATES_IN_PLACE and operand == 0:
        return 0
    if instruction.opcode in _TAKES_PART and operand == 0:
        return _elements(instruction) * _item_bits(source) // 8
    inner = _computation_of(module, instruction)
    if inner is None:
        in_place = {aliased for _, aliased in aliases(instruction)}
        return 0 if operand in in_place else num_bytes(source.shape)
    parameter = inner.parameters[operand]
    return min(
        _elements_used(module, inner, parameter) * _item_bits(source) // 8, num_bytes(source.shape)
    )


def bytes_written(module: HloModule, computation: Computation, instruction: Instruction) -> int:
    """Bytes that the instruction writes: its result, or the updates of one that works in place."""
    inner = _computation_of(module, instruction)
    if inner is not None:
        return _result_bytes(module, inner, inner.instructions[inner.root])
    if instruction.opcode in UPDATES_IN_PLACE:
        return _update_bytes(computation, instruction)
    if instruction.custom_call_target is not None:
        return _custom_call_result_bytes(instruction)
    if instruction.opcode.endswith("-start") and isinstance(instruction.shape, tuple):
        # A started collective's shape holds its operands beside its results.
        return num_bytes(instruction.shape) // 2
    return num_bytes(instruction.shape)


def _computation_of(module: HloModule, instruction: Instruction) -> Computation | None:
    called = instruction.called("calls") if instruction.opcode == "fusion" else None
    return module.computations[called] if called else None


def _elements(instruction: Instruction) -> int:
    return sum(array.size for array in arrays_of(instruction.shape))


def _item_bits(instruction: Instruction) -> int:
    return max((array.bits for array in arrays_of(instruction.shape)), default=0)


def _elements_used(module: HloModule, computation: Computation, value: Instruction) -> int:
    """Elements of `value` that its users in a fused computation ask for."""
    used = 0
    for user, operand in computation.users()[value.name]:
        if user.opcode in UPDATES_IN_PLACE and operand == 0:
            continue
        if user.opcode in _TAKES_PART and operand == 0:
            used += _elements(user)
        elif user.opcode == "fusion":
            inner = _computation_of(module, user)
            assert inner is not None
            used += _elements_used(module, inner, inner.parameters[operand])
        elif user.opcode in _UNARY and user.name != computation.root:
            used += _elements_used(module, computation, user)
        else:
            used += _elements(value)
    return min(used, _elements(value))


def _result_bytes(module: HloModule, computation: Computation, result: Instruction) -> int:
    if result.opcode == "tuple":
        return sum(
            _result_bytes(module, computation, computation.instructions[name])
            for name in result.operands
        )
    if result.opcode == "bitcast":
        source = computation.instructions[result.operands[0]]
        return _result_bytes(module, computation, source)
    if result.opcode in UPDATES_IN_PLACE:
        return _update_bytes(computation, result)
    inner = _computation_of(module, result)
    if inner is not None:
        return _result_bytes(module, inner, inner.instructions[inner.root])
    return num_bytes(result.shape)


def _update_bytes(computation: Computation, update: Instruction) -> int:
    if update.opcode == "dynamic-update-slice":
        written = update.operands[1:2]
    else:
        num_arrays = len(update.operands) // 2
        written = update.operands[num_arrays + 1 :]
    return sum(num_bytes(computation.instructions[name].shape) for name in written)


def aliases(instruction: Instruction) -> list[tuple[int, int]]:
    """(result index, operand index) pairs that share a buffer in a custom call that works in place."""
    if instruction.custom_call_target is None:
        return []
    pair = r"{(\d*)}: \((\d+), {[^}]*}\)"
    listed = re.search(
        rf"output_to_operand_aliasing={{((?:{pair}(?:, )?)+)}}", instruction.attributes
    )
    pairs = re.findall(pair, listed[1]) if listed else []
    return [(int(result or 0), int(operand)) for result, operand in pairs]


def _custom_call_result_bytes(instruction: Instruction) -> int:
    """Results that aren't aliased to an operand; a library's scratch space (int8 beside other results) isn't data."""
    results: list[Array] = list(arrays_of(instruction.shape))
    in_place = {result for result, _ in aliases(instruction)}
    return sum(
        array.num_bytes
        for i, array in enumerate(results)
        if i not in in_place and not (len(results) > 1 and array.dtype == "s8" and i > 0)
    )
