"""AWQ as AutoAWQ stores it ("gemm"): four bits, groups of columns with scales and zero points."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxinfer.weights.quantization.fields import group_size_of, need, refuse
from jaxinfer.weights.quantization.matrix import MatrixFormat, QuantizedMatrix
from jaxinfer.weights.quantization.packed import unpack_int32
from jaxinfer.weights.quantization.tensors import ModuleTensors

GROUP_SIZES = (32, 64, 128)

_PLACES = np.array([0, 4, 1, 5, 2, 6, 3, 7])
"""Which four bits of an int32 hold the first, second, ... of its eight outputs: kernels unpack pairs of 16 bits."""


@dataclass(frozen=True, slots=True)
class Awq:
    """qweight int32 [in, out / 8], qzeros int32 [in / g, out / 8], scales [in / g, out]."""

    group_size: int

    weight = ".qweight"
    others = (".qzeros", ".scales")
    logical = ".weight"
    transposed = False

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Awq:
        """Raises `ValueError` naming the field that isn't supported."""
        bits = need(config, "bits", config.get("w_bit"))
        if bits != 4:
            refuse("bits", bits, "4", "awq")
        version = str(config.get("version", "gemm")).lower()
        if version != "gemm":
            refuse("version", version, "'gemm'", "awq")
        if not config.get("zero_point", True):
            refuse("zero_point", config["zero_point"], "true", "awq")
        group_size = need(config, "group_size", config.get("q_group_size"))
        return cls(group_size_of(group_size, GROUP_SIZES, "awq"))

    def shape(self, tensors: ModuleTensors) -> tuple[int, int]:
        columns, words = tensors.matrix_shape(self.weight)
        if columns % self.group_size:
            tensors.fail(
                self.weight, f"has {columns} inputs, no multiple of group_size {self.group_size}"
            )
        return words * 8, columns

    def format(self, tensors: ModuleTensors) -> MatrixFormat:
        return MatrixFormat("uint4", self.group_size, tensors.float_dtype(".scales"), zeros=True)

    def read(self, tensors: ModuleTensors) -> QuantizedMatrix:
        rows, columns = self.shape(tensors)
        groups = columns // self.group_size
        codes = tensors.read(self.weight, (columns, rows // 8), ("int32",))
        zeros = tensors.read(".qzeros", (groups, rows // 8), ("int32",))
        arrays = {
            "codes": _outputs(codes).T,
            "scales": tensors.read(".scales", (groups, rows)).T,
            "zeros": _outputs(zeros).T,
        }
        return QuantizedMatrix(
            self.format(tensors),
            {name: np.ascontiguousarray(value) for name, value in arrays.items()},
        )


def _outputs(packed: np.ndarray) -> np.ndarray:
    """int32 [n, out / 8] to uint8 [n, out]."""
    values = unpack_int32(packed, 4, axis=1).reshape(len(packed), -1, 8)
    return values[:, :, _PLACES].reshape(len(packed), -1)
