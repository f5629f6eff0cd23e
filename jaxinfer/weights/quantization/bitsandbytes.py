"""The 4-bit checkpoints of bitsandbytes: NF4 codes of blocks, whose largest magnitudes may be quantized themselves."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxinfer.weights.quantization.fields import refuse
from jaxinfer.weights.quantization.matrix import NF4, MatrixFormat, QuantizedMatrix
from jaxinfer.weights.quantization.packed import nibbles
from jaxinfer.weights.quantization.tensors import ModuleTensors

_STATE = ".weight.quant_state.bitsandbytes__nf4"
_NESTED = (".weight.nested_absmax", ".weight.nested_quant_map")


@dataclass(frozen=True, slots=True)
class BitsAndBytes4Bit:
    """weight uint8 [n / 2, 1], the high four bits first; absmax of each block of the flat weight; the state as JSON.

    Blocks' magnitudes are resolved to float32 where they are quantized themselves.
    """

    weight = _STATE
    others = (".weight", ".weight.absmax", ".weight.quant_map", *_NESTED)
    logical = ".weight"
    transposed = False

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> BitsAndBytes4Bit:
        """Raises `ValueError` naming the field that isn't supported."""
        if config.get("load_in_8bit") or not config.get("load_in_4bit"):
            refuse("load_in_8bit", config.get("load_in_8bit"), "load_in_4bit true", "bitsandbytes")
        kind = config.get("bnb_4bit_quant_type", "fp4")
        if kind != "nf4":
            refuse("bnb_4bit_quant_type", kind, "'nf4'", "bitsandbytes")
        return cls()

    def _state(self, tensors: ModuleTensors) -> dict[str, Any]:
        raw = tensors.read(self.weight, dtypes=("uint8",))
        try:
            state = json.loads(raw.tobytes().decode())
            if isinstance(state, dict) and {"shape", "blocksize"} <= state.keys():
                return state
        except ValueError:
            pass
        tensors.fail(self.weight, "holds no JSON object with shape and blocksize")

    def shape(self, tensors: ModuleTensors) -> tuple[int, int]:
        state = self._state(tensors)
        shape, block = state["shape"], state["blocksize"]
        if len(shape) != 2:
            tensors.fail(self.weight, f"says shape {shape}; a matrix is expected")
        if shape[1] % block:
            tensors.fail(
                self.weight, f"says blocksize {block}, of which {shape[1]} inputs are no multiple"
            )
        return int(shape[0]), int(shape[1])

    def format(self, tensors: ModuleTensors) -> MatrixFormat:
        return MatrixFormat("nf4", int(self._state(tensors)["blocksize"]), "float32")

    def read(self, tensors: ModuleTensors) -> QuantizedMatrix:
        rows, columns = self.shape(tensors)
        state = self._state(tensors)
        count, blocks = rows * columns, rows * columns // state["blocksize"]
        packed = tensors.read(".weight", (count // 2, 1), ("uint8",))
        code_book = tensors.read(".weight.quant_map", (16,), ("float32",))
        if not np.allclose(code_book, NF4, rtol=0, atol=1e-6):
            tensors.fail(".weight.quant_map", "is not NF4's")
        if tensors.has(_NESTED[0]):
            magnitudes = self._nested(tensors, state, blocks)
        else:
            magnitudes = tensors.read(".weight.absmax", (blocks,), ("float32",))
        codes = nibbles(packed.reshape(-1), high_first=True).reshape(rows, columns)
        return QuantizedMatrix(
            self.format(tensors), {"codes": codes, "scales": magnitudes.reshape(rows, -1)}
        )

    def _nested(self, tensors: ModuleTensors, state: dict[str, Any], blocks: int) -> np.ndarray:
        """Magnitudes [blocks] from their codes: an entry of a table, times that of 256 blocks, plus an offset for all."""
        size = int(state["nested_blocksize"])
        codes = tensors.read(".weight.absmax", (blocks,), ("uint8",))
        table = tensors.read(_NESTED[1], (256,), ("float32",))
        coarse = tensors.read(_NESTED[0], (-(-blocks // size),), ("float32",))
        scales = np.repeat(coarse, size)[:blocks]
        return table[codes] * scales + np.float32(state["nested_offset"])
