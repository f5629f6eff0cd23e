"""What a quantized checkpoint means, worked out from the definitions of its format alone."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from safetensors import safe_open


def read_tensors(directory: Path) -> dict[str, np.ndarray]:
    """All of a directory, float8 and bfloat16 as float32."""
    import torch

    found = {}
    for path in sorted(directory.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118
                tensor = file.get_tensor(name)
                exotic = tensor.dtype in (torch.bfloat16, torch.float8_e4m3fn)
                found[name] = (tensor.float() if exotic else tensor).numpy()
    return found


def dequantized(directory: Path) -> dict[str, np.ndarray]:
    """The tensors of the checkpoint that it was made from, as far as rounding left them; weights in float64."""
    config = json.loads((directory / "config.json").read_text())["quantization_config"]
    tensors, result = read_tensors(directory), {}
    for name, tensor in tensors.items():
        module, _, kind = name.rpartition(".")
        if kind == "qweight":
            size = config["group_size"]
            codes, zeros = _awq_codes(tensor), _awq_codes(tensors[f"{module}.qzeros"])
            scales = tensors[f"{module}.scales"].astype(np.float64)
            weight_io = (codes - zeros.repeat(size, 0)) * scales.repeat(size, 0)
            result[f"{module}.weight"] = weight_io.T
        elif kind == "weight_packed":
            size = config["config_groups"]["group_0"]["weights"]["group_size"]
            scales = tensors[f"{module}.weight_scale"].astype(np.float64)
            zeros = _nibbles(tensors[f"{module}.weight_zero_point"].T).T
            codes = _nibbles(tensor)
            assert codes.shape == tuple(tensors[f"{module}.weight_shape"])
            result[f"{module}.weight"] = (codes - zeros.repeat(size, 1)) * scales.repeat(size, 1)
        elif f"{module}.weight_scale" in tensors and kind == "weight":
            result[name] = tensor.astype(np.float64) * tensors[f"{module}.weight_scale"]
        elif kind not in ("qzeros", "scales", "weight_scale", "weight_zero_point", "weight_shape"):
            result[name] = tensor
    return result


def _nibbles(words: np.ndarray) -> np.ndarray:
    """[N, M] int32 -> [N, 8 M], from the lowest up."""
    words = words.astype(np.int64)
    return np.stack([(words >> (4 * i)) & 15 for i in range(8)], axis=-1).reshape(len(words), -1)


def _awq_codes(words: np.ndarray) -> np.ndarray:
    """AutoAWQ's order: columns 0, 2, 4, 6, 1, 3, 5, 7 from the lowest nibble up."""
    nibbles = _nibbles(words).reshape(len(words), -1, 8)
    return nibbles[:, :, [0, 4, 1, 5, 2, 6, 3, 7]].reshape(len(words), -1)
