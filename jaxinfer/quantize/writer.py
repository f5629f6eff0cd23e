"""Writing Hugging Face checkpoints: safetensors files of bounded size with their index, and what lies beside them."""

from __future__ import annotations

import json
import shutil
import struct
from pathlib import Path
from typing import Any

import numpy as np

from jaxinfer.frontend.tokenizer import Tokenizer
from jaxinfer.weights.reader import CheckpointReader
from jaxinfer.weights.resolve import ModelFiles
from jaxinfer.weights.safetensors import INDEX_NAME

_DTYPE_CODES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
}
"""https://huggingface.co/docs/safetensors"""
_WEIGHT_SUFFIXES = {".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx"}
_CONFIGS = {"config.json", "generation_config.json"}


class ShardWriter:
    """Tensors into files of at most `max_bytes` of them each (one tensor may be larger), no more than that in memory."""

    def __init__(self, directory: Path, max_bytes: int) -> None:
        self._directory, self._max_bytes = directory, max_bytes
        self._held: dict[str, np.ndarray] = {}
        self._shards: list[list[str]] = []
        self._total_bytes = 0

    def add(self, name: str, tensor: np.ndarray) -> None:
        held = sum(array.nbytes for array in self._held.values())
        if self._held and held + tensor.nbytes > self._max_bytes:
            self._flush()
        self._held[name] = np.ascontiguousarray(tensor).reshape(tensor.shape)
        self._total_bytes += tensor.nbytes

    def finish(self) -> None:
        """Writes what is left, and with more than one file their index. The files get their names only now."""
        self._flush()
        count = len(self._shards)
        if count == 1:
            self._part(0).rename(self._directory / "model.safetensors")
            return
        weight_map = {}
        for i, names in enumerate(self._shards):
            file = f"model-{i + 1:05}-of-{count:05}.safetensors"
            self._part(i).rename(self._directory / file)
            weight_map |= dict.fromkeys(names, file)
        index = {"metadata": {"total_size": self._total_bytes}, "weight_map": weight_map}
        write_json(self._directory / INDEX_NAME, index)

    def _part(self, index: int) -> Path:
        return self._directory / f"part-{index}"

    def _flush(self) -> None:
        _write_safetensors(self._part(len(self._shards)), self._held)
        self._shards.append(list(self._held))
        self._held = {}


def _write_safetensors(path: Path, tensors: dict[str, np.ndarray]) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in tensors.items():
        start, end = end, end + tensor.nbytes
        header[name] = {
            "dtype": _DTYPE_CODES[tensor.dtype.name],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for tensor in tensors.values():
            file.write(tensor.reshape(-1).view(np.uint8).data)


def write_surroundings(
    out: Path,
    files: ModelFiles,
    reader: CheckpointReader,
    tokenizer: Tokenizer,
    quantization: dict[str, Any],
) -> None:
    """Both configurations, the tokenizer, and what else a Hugging Face directory holds beside its weights."""
    if files.kind == "hf":
        for path in files.path.iterdir():
            is_text = path.is_file() and path.suffix not in _WEIGHT_SUFFIXES
            if is_text and path.name not in _CONFIGS and not path.name.endswith(".index.json"):
                shutil.copyfile(path, out / path.name)
        templates = files.path / "additional_chat_templates"
        if templates.is_dir():
            shutil.copytree(templates, out / templates.name)
    else:
        tokenizer.save(out)
    if (generation := reader.generation_config()) is not None:
        write_json(out / "generation_config.json", generation)
    write_json(out / "config.json", reader.config() | {"quantization_config": quantization})


def write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
