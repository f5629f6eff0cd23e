"""The checkpoints of llm-compressor (https://github.com/vllm-project/compressed-tensors): packed integers, int8 and FP8."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxinfer.weights.quantization.fields import group_size_of, need, refuse
from jaxinfer.weights.quantization.fp8 import BLOCK_SIZE, block_scales, row_scales
from jaxinfer.weights.quantization.matrix import Activation, MatrixFormat, QuantizedMatrix
from jaxinfer.weights.quantization.packed import unpack_int32
from jaxinfer.weights.quantization.tensors import ModuleTensors

METHOD = "compressed-tensors"
GROUP_SIZES = (32, 64, 128)


@dataclass(frozen=True, slots=True)
class PackedIntegers:
    """weight_packed int32 [out, in * bits / 32], weight_scale [out, in / g], weight_zero_point int32 [out * bits / 32, in / g]
    of unsymmetric weights, weight_shape [2], weight_g_idx [in]; `group_size` None: a scale per row."""

    bits: int
    group_size: int | None
    symmetric: bool
    act_order: bool

    weight = ".weight_packed"
    others = (".weight_scale", ".weight_zero_point", ".weight_shape", ".weight_g_idx")
    logical = ".weight"
    transposed = False

    def shape(self, tensors: ModuleTensors) -> tuple[int, int]:
        rows, words = tensors.matrix_shape(self.weight)
        columns = words * 32 // self.bits
        if tensors.has(".weight_shape"):
            stated = tuple(int(n) for n in tensors.read(".weight_shape", (2,)))
            if stated != (rows, columns):
                tensors.fail(
                    ".weight_shape", f"says {stated}, the packed weight is {(rows, columns)}"
                )
        if self.group_size is not None and columns % self.group_size:
            tensors.fail(
                self.weight, f"has {columns} inputs, no multiple of group_size {self.group_size}"
            )
        return rows, columns

    def format(self, tensors: ModuleTensors) -> MatrixFormat:
        group_size = self.group_size
        if group_size is None and not self.symmetric:
            group_size = self.shape(tensors)[1]
        four = self.bits == 4
        return MatrixFormat(
            "uint4" if four else "int8" if self.symmetric else "uint8",
            group_size,
            tensors.float_dtype(".weight_scale"),
            zero=8 if four and self.symmetric else 0,
            zeros=not self.symmetric,
            ordered=self.act_order,
        )

    def read(self, tensors: ModuleTensors) -> QuantizedMatrix:
        rows, columns = self.shape(tensors)
        form, per_word = self.format(tensors), 32 // self.bits
        groups = 1 if self.group_size is None else columns // self.group_size
        words = tensors.read(self.weight, (rows, columns // per_word), ("int32",))
        # Stored as unsigned numbers: the signed ones of before, plus half the range.
        codes = unpack_int32(words, self.bits, axis=1)
        scales = tensors.read(".weight_scale", (rows, groups))
        arrays = {"scales": scales if form.group_size else scales[:, 0]}
        if not self.symmetric:
            shape = (-(-rows // per_word), groups)
            packed = tensors.read(".weight_zero_point", shape, ("int32",))
            arrays["zeros"] = unpack_int32(packed, self.bits, axis=0)[:rows]
        elif self.bits == 8:
            codes = (codes ^ np.uint8(128)).view(np.int8)
        order = None
        if self.act_order:
            assert self.group_size is not None
            order = tensors.group_order(".weight_g_idx", columns, self.group_size)
            codes = codes[:, order]
        arrays["codes"] = codes
        contiguous = {name: np.ascontiguousarray(value) for name, value in arrays.items()}
        return QuantizedMatrix(form, contiguous, order)


@dataclass(frozen=True, slots=True)
class Quantized8Bit:
    """weight int8 or float8_e4m3fn [out, in] as it is, weight_scale of the whole ([] or [1]), of rows ([out, 1]) or of
    128 x 128 blocks, input_scale of static activations."""

    kind: Activation
    """Of the codes."""
    per_block: bool
    activation: Activation | None
    static_input: bool

    weight = ".weight"
    others = (".weight_scale", ".input_scale", ".weight_zero_point", ".input_zero_point")
    logical = ".weight"
    transposed = False

    def shape(self, tensors: ModuleTensors) -> tuple[int, int]:
        return tensors.matrix_shape(self.weight)

    def format(self, tensors: ModuleTensors) -> MatrixFormat:
        return MatrixFormat(
            self.kind,
            BLOCK_SIZE if self.per_block else None,
            tensors.float_dtype(".weight_scale"),
            activation=self.activation,
            static_input=self.static_input,
        )

    def read(self, tensors: ModuleTensors) -> QuantizedMatrix:
        shape = self.shape(tensors)
        dtype = "int8" if self.kind == "int8" else "float8_e4m3fn"
        codes = tensors.read(self.weight, shape, (dtype,))
        read_scales = block_scales if self.per_block else row_scales
        arrays = {"codes": codes, "scales": read_scales(tensors, ".weight_scale", shape)}
        for suffix in (".weight_zero_point", ".input_zero_point"):
            if tensors.has(suffix) and tensors.read(suffix).astype(np.int64).any():
                tensors.fail(suffix, "is not zero, though its numbers are said to be symmetric")
        input_scale = tensors.scalar(".input_scale") if self.static_input else None
        return QuantizedMatrix(self.format(tensors), arrays, input_scale=input_scale)


def scheme_of_group(group: dict[str, Any], default_format: str) -> PackedIntegers | Quantized8Bit:
    """The scheme of one entry of `config_groups`. Raises `ValueError` naming the field that isn't supported."""
    weights = need(group, "weights")
    bits, kind = need(weights, "num_bits"), weights.get("type", "int")
    strategy = weights.get("strategy") or ("group" if weights.get("group_size") else "tensor")
    symmetric = bool(weights.get("symmetric", True))
    stored_as = group.get("format") or default_format
    if stored_as in ("naive-quantized", "mixed-precision"):
        stored_as = "float-quantized" if kind == "float" else "int-quantized"
    inputs = group.get("input_activations")
    if group.get("output_activations"):
        refuse("output_activations", group["output_activations"], "null", METHOD)
    if stored_as == "pack-quantized":
        return _packed(weights, bits, kind, strategy, symmetric, inputs)
    if stored_as not in ("int-quantized", "float-quantized"):
        known = "pack-quantized, int-quantized, float-quantized, naive-quantized, mixed-precision"
        refuse("format", stored_as, known, METHOD)
    is_float = stored_as == "float-quantized"
    if bits != 8 or (kind == "float") != is_float:
        wanted = f"num_bits 8 of type {'float' if is_float else 'int'}"
        refuse("weights", {"num_bits": bits, "type": kind}, f"{wanted} as {stored_as}", METHOD)
    if not symmetric:
        refuse("weights.symmetric", False, f"true as {stored_as}", METHOD)
    strategies = ("tensor", "channel", "block") if is_float else ("tensor", "channel")
    if strategy not in strategies:
        refuse("weights.strategy", strategy, f"{', '.join(strategies)} as {stored_as}", METHOD)
    block = weights.get("block_structure")
    if strategy == "block" and list(block or ()) != [BLOCK_SIZE, BLOCK_SIZE]:
        refuse("weights.block_structure", block, f"[{BLOCK_SIZE}, {BLOCK_SIZE}]", METHOD)
    activation, static = _activation(inputs, is_float, strategy)
    return Quantized8Bit("e4m3" if is_float else "int8", strategy == "block", activation, static)


def _packed(
    weights: dict[str, Any], bits: Any, kind: str, strategy: str, symmetric: bool, inputs: Any
) -> PackedIntegers:
    if bits not in (4, 8) or kind != "int":
        value = {"num_bits": bits, "type": kind}
        refuse("weights", value, "num_bits 4 or 8 of type int as pack-quantized", METHOD)
    if inputs:
        refuse("input_activations", inputs, "null as pack-quantized", METHOD)
    if strategy not in ("group", "channel"):
        refuse("weights.strategy", strategy, "group, channel as pack-quantized", METHOD)
    group_size = None
    if strategy == "group":
        group_size = group_size_of(need(weights, "group_size"), GROUP_SIZES, METHOD)
    # "weight" and "static" leave the inputs where they are.
    return PackedIntegers(bits, group_size, symmetric, weights.get("actorder") in (True, "group"))


def _activation(inputs: Any, is_float: bool, strategy: str) -> tuple[Activation | None, bool]:
    """What the inputs are quantized to, and whether with a stored scale."""
    if not inputs:
        return None, False
    kind: Activation = "e4m3" if is_float else "int8"
    bits, dtype = need(inputs, "num_bits"), inputs.get("type", "int")
    if bits != 8 or dtype != ("float" if is_float else "int"):
        supported = "num_bits 8 of the weights' type"
        refuse("input_activations", {"num_bits": bits, "type": dtype}, supported, METHOD)
    if not inputs.get("symmetric", True):
        refuse("input_activations.symmetric", False, "true", METHOD)
    if inputs.get("dynamic"):
        per = inputs.get("strategy", "token")
        expected = "group" if strategy == "block" else "token"
        if per not in (expected, "token"):
            refuse("input_activations.strategy", per, expected, METHOD)
        if strategy == "block" and inputs.get("group_size", BLOCK_SIZE) != BLOCK_SIZE:
            value = inputs["group_size"]
            refuse("input_activations.group_size", value, str(BLOCK_SIZE), METHOD)
        return kind, False
    if inputs.get("strategy", "tensor") != "tensor" or strategy == "block":
        refuse("input_activations.strategy", inputs.get("strategy"), "tensor if static", METHOD)
    return kind, True
