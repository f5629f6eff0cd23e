"""The experts of gpt-oss in MXFP4: four-bit floats, 32 of which share a power of two (OCP Microscaling Formats 1.0)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from jaxinfer.weights.quantization.matrix import MatrixFormat, QuantizedMatrix
from jaxinfer.weights.quantization.packed import nibbles
from jaxinfer.weights.quantization.tensors import ModuleTensors

GROUP_SIZE = 32


@dataclass(frozen=True, slots=True)
class Mxfp4:
    """{name}_blocks uint8 [experts, out, in / 32, 16], low four bits first, {name}_scales uint8 [experts, out, in / 32].

    What they stand for is the transpose, {name} [experts, in, out]; the matrix read here is [experts, out, in].
    """

    weight = "_blocks"
    others = ("_scales",)
    logical = ""
    transposed = True

    def shape(self, tensors: ModuleTensors) -> tuple[int, int, int]:
        shape = tensors.shape(self.weight)
        if len(shape) != 4 or shape[3] != GROUP_SIZE // 2:
            tensors.fail(self.weight, f"has shape {shape}; expected [experts, out, in / 32, 16]")
        return shape[0], shape[1], shape[2] * GROUP_SIZE

    def format(self, tensors: ModuleTensors) -> MatrixFormat:
        return MatrixFormat("e2m1", GROUP_SIZE, "float8_e8m0fnu")

    def read(self, tensors: ModuleTensors) -> QuantizedMatrix:
        shape = experts, rows, columns = self.shape(tensors)
        blocks = tensors.read(self.weight, dtypes=("uint8",))
        scales = tensors.read("_scales", (experts, rows, columns // GROUP_SIZE), ("uint8",))
        codes = nibbles(blocks).reshape(shape)
        return QuantizedMatrix(
            self.format(tensors), {"codes": codes, "scales": np.ascontiguousarray(scales)}
        )
