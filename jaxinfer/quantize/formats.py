"""How quantized weights lie in a checkpoint, as AutoAWQ and compressed-tensors have them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np

from jaxinfer.quantize.grids import Int4Groups, round_to_e4m3, round_to_int4, round_to_int8

_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Which of eight neighbouring columns each nibble of an AWQ word holds, from the lowest."""

Tensors = dict[str, np.ndarray]


class Format(Protocol):
    def quantized(self, module: str, weight_oi: np.ndarray) -> Tensors:
        """The tensors that stand for a weight [O, I] float32 of the module of that name."""
        ...

    def config(self, ignored: Sequence[str]) -> dict[str, Any]:
        """`quantization_config` of config.json. `ignored`: modules that would be, but aren't quantized."""
        ...


@dataclass(frozen=True, slots=True)
class AwqFormat:
    """AutoAWQ's, of version "gemm": transposed, eight columns in a word."""

    group_size: int

    @property
    def scale_dtype(self) -> np.dtype:
        return np.dtype(np.float16)

    def quantized(self, module: str, weight_oi: np.ndarray) -> Tensors:
        return self.packed(module, round_to_int4(weight_oi, self.group_size))

    def packed(self, module: str, rounded: Int4Groups) -> Tensors:
        """Weights that are rounded already, with scales of `scale_dtype`."""
        return {
            f"{module}.qweight": _packed(np.asarray(rounded.codes).T, _AWQ_ORDER),
            f"{module}.qzeros": _packed(np.asarray(rounded.zeros).T, _AWQ_ORDER),
            f"{module}.scales": np.ascontiguousarray(np.asarray(rounded.scales).T),
        }

    def config(self, ignored: Sequence[str]) -> dict[str, Any]:
        return {
            "quant_method": "awq",
            "bits": 4,
            "group_size": self.group_size,
            "zero_point": True,
            "version": "gemm",
            "modules_to_not_convert": list(ignored),
        }


@dataclass(frozen=True, slots=True)
class CompressedTensorsFormat:
    """That of the compressed-tensors package."""

    weights: Literal["int4", "int8", "fp8"]
    """Of the matrices: int4 in groups, with the activations as they are; int8 and fp8 by row, with activations quantized
    alike token by token."""
    scale_dtype: np.dtype
    group_size: int | None = None
    int8_embedding: bool = False

    def quantized(self, module: str, weight_oi: np.ndarray) -> Tensors:
        if self.weights == "int4":
            assert self.group_size is not None
            rounded = round_to_int4(weight_oi, self.group_size, self.scale_dtype)
            return self.packed(module, rounded)
        to_8_bits = round_to_int8 if self.weights == "int8" else round_to_e4m3
        codes, scales = to_8_bits(weight_oi, self.scale_dtype)
        return {f"{module}.weight": codes, f"{module}.weight_scale": scales}

    def quantized_embedding(self, module: str, weight_ve: np.ndarray) -> Tensors:
        codes, scales = round_to_int8(weight_ve, self.scale_dtype)
        return {f"{module}.weight": codes, f"{module}.weight_scale": scales}

    def packed(self, module: str, rounded: Int4Groups) -> Tensors:
        """Weights of "int4" that are rounded already, with scales of `scale_dtype`."""
        codes = np.asarray(rounded.codes)
        in_order = tuple(range(8))
        zeros_by_row = _packed(np.asarray(rounded.zeros).T, in_order).T
        return {
            f"{module}.weight_packed": _packed(codes, in_order),
            f"{module}.weight_scale": np.asarray(rounded.scales),
            f"{module}.weight_zero_point": np.ascontiguousarray(zeros_by_row),
            f"{module}.weight_shape": np.array(codes.shape, np.int64),
        }

    def config(self, ignored: Sequence[str]) -> dict[str, Any]:
        by_row = {"dynamic": False, "strategy": "channel", "symmetric": True}
        by_token = {"dynamic": True, "strategy": "token", "symmetric": True}
        int8, fp8 = ({"num_bits": 8, "type": kind} for kind in ("int", "float"))
        layout, weights, activations = {
            "int4": (
                "pack-quantized",
                {
                    "num_bits": 4,
                    "type": "int",
                    "dynamic": False,
                    "strategy": "group",
                    "group_size": self.group_size,
                    "symmetric": False,
                },
                None,
            ),
            "int8": ("int-quantized", int8 | by_row, int8 | by_token),
            "fp8": ("float-quantized", fp8 | by_row, fp8 | by_token),
        }[self.weights]
        groups = {"group_0": _group("Linear", layout, weights, activations)}
        if self.int8_embedding:
            groups["group_1"] = _group("Embedding", "int-quantized", int8 | by_row, None)
        layouts = {group["format"] for group in groups.values()}
        return {
            "quant_method": "compressed-tensors",
            "format": layout if len(layouts) == 1 else "mixed-precision",
            "quantization_status": "compressed",
            "config_groups": groups,
            "ignore": list(ignored),
        }


def _group(
    target: str, layout: str, weights: dict[str, Any], activations: dict[str, Any] | None
) -> dict[str, Any]:
    return {
        "targets": [target],
        "format": layout,
        "weights": weights,
        "input_activations": activations,
        "output_activations": None,
    }


def _packed(codes: np.ndarray, order: Sequence[int]) -> np.ndarray:
    """[N, 8 M] of 4 bits -> [N, M] int32, `order[i]` the column in nibble i of each word."""
    by_word = codes.reshape(codes.shape[0], -1, 8)[:, :, list(order)].astype(np.uint32)
    shifts = 4 * np.arange(8, dtype=np.uint32)
    return np.bitwise_or.reduce(by_word << shifts, axis=-1).view(np.int32)
