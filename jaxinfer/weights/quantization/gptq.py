"""GPTQ as AutoGPTQ and GPTQModel store it: four or eight bits, groups of inputs, which may stand in any order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxinfer.weights.quantization.fields import group_size_of, need, refuse
from jaxinfer.weights.quantization.matrix import Codes, MatrixFormat, QuantizedMatrix
from jaxinfer.weights.quantization.packed import unpack_int32
from jaxinfer.weights.quantization.tensors import ModuleTensors

GROUP_SIZES = (32, 64, 128, -1)
_BITS = (4, 8)
_FORMATS = ("gptq", "gptq_v2")


@dataclass(frozen=True, slots=True)
class Gptq:
    """qweight int32 [in * bits / 32, out], qzeros int32 [in / g, out * bits / 32], scales [in / g, out], g_idx int32 [in].

    `zero_offset`: what stored zero points lack; the first version of the format has them less one.
    """

    bits: int
    group_size: int
    symmetric: bool
    act_order: bool
    zero_offset: int

    weight = ".qweight"
    others = (".qzeros", ".scales", ".g_idx")
    logical = ".weight"
    transposed = False

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Gptq:
        """Raises `ValueError` naming the field that isn't supported."""
        bits = need(config, "bits")
        if bits not in _BITS:
            refuse("bits", bits, "4, 8", "gptq")
        stored_as = config.get("checkpoint_format", "gptq")
        if stored_as not in _FORMATS:
            refuse("checkpoint_format", stored_as, ", ".join(_FORMATS), "gptq")
        if config.get("dynamic"):
            refuse("dynamic", config["dynamic"], "the same bits and groups in every module", "gptq")
        return cls(
            bits,
            group_size_of(need(config, "group_size"), GROUP_SIZES, "gptq"),
            bool(config.get("sym", True)),
            bool(config.get("desc_act", False)),
            int(stored_as == "gptq"),
        )

    def shape(self, tensors: ModuleTensors) -> tuple[int, int]:
        words, rows = tensors.matrix_shape(self.weight)
        columns = words * 32 // self.bits
        if self.group_size > 0 and columns % self.group_size:
            tensors.fail(
                self.weight, f"has {columns} inputs, no multiple of group_size {self.group_size}"
            )
        return rows, columns

    def format(self, tensors: ModuleTensors) -> MatrixFormat:
        unsigned, signed, zero = _CODES[self.bits]
        return MatrixFormat(
            signed if self.symmetric else unsigned,
            self._group_size(tensors),
            tensors.float_dtype(".scales"),
            zero if self.symmetric else 0,
            zeros=not self.symmetric,
            ordered=self._ordered,
        )

    def _group_size(self, tensors: ModuleTensors) -> int | None:
        """One group of all inputs, where it has zero points, is a group as others are."""
        if self.group_size > 0:
            return self.group_size
        return None if self.symmetric else self.shape(tensors)[1]

    @property
    def _ordered(self) -> bool:
        return self.act_order and self.group_size > 0

    def read(self, tensors: ModuleTensors) -> QuantizedMatrix:
        rows, columns = self.shape(tensors)
        form, per_word = self.format(tensors), 32 // self.bits
        groups = 1 if self.group_size < 0 else columns // self.group_size
        words = tensors.read(self.weight, (columns // per_word, rows), ("int32",))
        packed_zeros = tensors.read(".qzeros", (groups, rows // per_word), ("int32",))
        scales = tensors.read(".scales", (groups, rows))
        codes = unpack_int32(words, self.bits, axis=0).T
        # A zero point of 0 was stored as the largest number, which the offset takes back to 0.
        zeros = (unpack_int32(packed_zeros, self.bits, axis=1) + np.uint8(self.zero_offset)) & (
            (1 << self.bits) - 1
        )
        arrays = {"scales": scales.T}
        middle = 1 << (self.bits - 1)
        if not self.symmetric:
            arrays["zeros"] = zeros.T
        elif (zeros != middle).any():
            tensors.fail(".qzeros", f"holds zero points other than {middle}, though sym is true")
        elif self.bits == 8:
            codes = (codes ^ np.uint8(128)).view(np.int8)
        order = self._order(tensors, columns)
        arrays["codes"] = codes if order is None else codes[:, order]
        if form.group_size is None:
            arrays["scales"] = scales[0]
        return QuantizedMatrix(
            form,
            {name: np.ascontiguousarray(value) for name, value in arrays.items()},
            order if self._ordered else None,
        )

    def _order(self, tensors: ModuleTensors, columns: int) -> np.ndarray | None:
        """The inputs by group, and within a group as they come; None where they stand so."""
        if self.group_size < 0:
            return None
        if not self.act_order and not tensors.has(".g_idx"):
            return None
        order = tensors.group_order(".g_idx", columns, self.group_size)
        if not self.act_order and (order != np.arange(columns)).any():
            tensors.fail(".g_idx", "reorders the inputs, though desc_act is false")
        return order if self.act_order else None


_CODES: dict[int, tuple[Codes, Codes, int]] = {4: ("uint4", "uint4", 8), 8: ("uint8", "int8", 0)}
"""By bits: the codes with zero points and without, and what of these stands for zero."""
