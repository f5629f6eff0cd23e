"""FP8 checkpoints: float8_e4m3fn with a scale for the matrix, for each row, or for blocks of 128 x 128 as DeepSeek's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxinfer.weights.quantization.fields import refuse
from jaxinfer.weights.quantization.matrix import MatrixFormat, QuantizedMatrix
from jaxinfer.weights.quantization.tensors import ModuleTensors

BLOCK_SIZE = 128


@dataclass(frozen=True, slots=True)
class Fp8:
    """weight float8_e4m3fn [out, in]; weight_scale_inv [ceil(out / 128), ceil(in / 128)] of blocks, or weight_scale of the
    whole or of rows, both of which multiply; input_scale where the activations' scale is static."""

    per_block: bool
    static_input: bool

    weight = ".weight"
    others = (".weight_scale_inv", ".weight_scale", ".input_scale")
    logical = ".weight"
    transposed = False

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Fp8:
        """Raises `ValueError` naming the field that isn't supported."""
        block = config.get("weight_block_size")
        if block is not None and list(block) != [BLOCK_SIZE, BLOCK_SIZE]:
            refuse("weight_block_size", block, f"[{BLOCK_SIZE}, {BLOCK_SIZE}], null", "fp8")
        scheme = config.get("activation_scheme", "dynamic")
        if scheme not in ("dynamic", "static") or (scheme == "static" and block):
            supported = "'dynamic'" if block else "'dynamic', 'static'"
            refuse("activation_scheme", scheme, supported, "fp8")
        stored_as = config.get("fmt", "e4m3")
        if stored_as != "e4m3":
            refuse("fmt", stored_as, "'e4m3'", "fp8")
        return cls(block is not None, scheme == "static")

    def shape(self, tensors: ModuleTensors) -> tuple[int, int]:
        return tensors.matrix_shape(self.weight)

    def _scale(self, tensors: ModuleTensors) -> str:
        inverse, plain = self.others[:2]
        return plain if tensors.has(plain) and not tensors.has(inverse) else inverse

    def format(self, tensors: ModuleTensors) -> MatrixFormat:
        return MatrixFormat(
            "e4m3",
            BLOCK_SIZE if self.per_block else None,
            tensors.float_dtype(self._scale(tensors)),
            activation="e4m3",
            static_input=self.static_input,
        )

    def read(self, tensors: ModuleTensors) -> QuantizedMatrix:
        shape = self.shape(tensors)
        read_scales = block_scales if self.per_block else row_scales
        arrays = {
            "codes": tensors.read(self.weight, shape, ("float8_e4m3fn",)),
            "scales": read_scales(tensors, self._scale(tensors), shape),
        }
        input_scale = tensors.scalar(".input_scale") if self.static_input else None
        return QuantizedMatrix(self.format(tensors), arrays, input_scale=input_scale)


def block_scales(tensors: ModuleTensors, suffix: str, shape: tuple[int, int]) -> np.ndarray:
    """[out, in / 128]: each row has those of its block."""
    rows, columns = shape
    if columns % BLOCK_SIZE:
        tensors.fail(
            suffix, f"scales blocks of {BLOCK_SIZE}, of which {columns} inputs are no multiple"
        )
    scales = tensors.read(suffix, (-(-rows // BLOCK_SIZE), columns // BLOCK_SIZE))
    return np.repeat(scales, BLOCK_SIZE, axis=0)[:rows]


def row_scales(tensors: ModuleTensors, suffix: str, shape: tuple[int, int]) -> np.ndarray:
    """[out], from one for all ([] or [1]) or one per row ([out, 1] or [out])."""
    scales, rows = tensors.read(suffix), shape[0]
    if scales.shape not in ((), (1,), (1, 1), (rows,), (rows, 1)):
        tensors.fail(suffix, f"has shape {scales.shape}, expected [], [1] or {(rows, 1)}")
    return np.ascontiguousarray(np.broadcast_to(scales.reshape(-1), rows))
