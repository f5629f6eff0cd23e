"""Hugging Face directories: config.json and one or several safetensors files."""

from __future__ import annotations

import json
import struct
import threading
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from jaxinfer.weights.reader import CheckpointError, aligned_empty, numpy_dtype, read_bytes

# https://huggingface.co/docs/safetensors: dtype names as the header writes them.
_DTYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U8": "uint8",
    "BOOL": "bool",
}
INDEX_NAME = "model.safetensors.index.json"
_MAX_HEADER_BYTES = 100_000_000


@dataclass(frozen=True, slots=True)
class _Entry:
    path: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


def read_json(path: Path) -> dict[str, Any] | None:
    """The object in `path`, None where there is no such file. Raises `CheckpointError` where it is no JSON object."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise CheckpointError(f"{path} is not valid JSON: {error}.") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} must hold a JSON object, found a {type(value).__name__}.")
    return value


def _read_header(path: Path) -> dict[str, _Entry]:
    """Raises `CheckpointError` for a damaged header, or where the file ends before a tensor does."""
    size = path.stat().st_size
    with path.open("rb") as file:
        prefix = file.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else size
        if length > min(size - 8, _MAX_HEADER_BYTES):
            raise CheckpointError(
                f"{path} is cut short or no safetensors file: it ends within its header."
            )
        try:
            header = json.loads(file.read(length))
            header.pop("__metadata__", None)
            entries = {
                name: (value["dtype"], tuple(value["shape"]), *value["data_offsets"])
                for name, value in header.items()
            }
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{path} has a damaged safetensors header: {error!r}.") from error
    start = 8 + length
    found = {}
    for name, (code, shape, begin, end) in entries.items():
        if code not in _DTYPES:
            raise CheckpointError(
                f"Tensor {name} in {path} has dtype {code}; supported are {', '.join(_DTYPES)}."
            )
        entry = _Entry(path, _DTYPES[code], shape, start + begin, end - begin)
        expected = int(np.prod(shape, dtype=np.int64)) * numpy_dtype(entry.dtype).itemsize
        if entry.nbytes != expected:
            raise CheckpointError(
                f"Tensor {name} in {path} takes {entry.nbytes} bytes, but {entry.dtype} of shape {shape} is {expected}."
            )
        if start + end > size:
            raise CheckpointError(
                f"{path} is cut short: tensor {name} ends at byte {start + end}, the file at {size}."
            )
        found[name] = entry
    return found


def read_file(path: Path, see: Callable[[memoryview], object]) -> dict[str, np.ndarray]:
    """All tensors of one file, as they are stored; `see` gets its bytes, in their order. Raises `CheckpointError` where
    it is damaged."""
    entries = _read_header(path)
    data = np.fromfile(path, np.uint8)
    see(memoryview(data))
    return {
        name: data[entry.offset : entry.offset + entry.nbytes]
        .copy()
        .view(numpy_dtype(entry.dtype))
        .reshape(entry.shape)
        for name, entry in entries.items()
    }


class SafetensorsReader:
    """A `CheckpointReader` over a directory. The first question about tensors reads every header, so that what is
    missing or cut short is said before anything is loaded; without one (dummy weights) config.json is enough."""

    holds_leaves = False

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        config = read_json(directory / "config.json")
        if config is None:
            raise CheckpointError(f"{directory} has no config.json.")
        self._config = config
        self._handles: dict[Path, BinaryIO] = {}
        self._opening = threading.Lock()

    def _handle(self, path: Path) -> BinaryIO:
        """The shard, opened once: a second handle would close its file under the thread that reads from it."""
        with self._opening:
            if path not in self._handles:
                self._handles[path] = path.open("rb")
            return self._handles[path]

    @cached_property
    def _entries(self) -> dict[str, _Entry]:
        index = read_json(self.directory / INDEX_NAME)
        if index is None:
            files = sorted(self.directory.glob("*.safetensors"))
            if not files:
                raise CheckpointError(f"{self.directory} holds no *.safetensors file.")
            return {name: entry for path in files for name, entry in _read_header(path).items()}
        weight_map: dict[str, str] = index.get("weight_map", {})
        first = {file: name for name, file in reversed(weight_map.items())}
        for file, name in first.items():
            if not (self.directory / file).is_file():
                raise CheckpointError(
                    f"File {self.directory / file} is missing: {INDEX_NAME} places tensor {name} there."
                )
        shards = {file: _read_header(self.directory / file) for file in sorted(first)}
        for name, file in weight_map.items():
            if name not in shards[file]:
                raise CheckpointError(
                    f"Tensor {name} is not in {self.directory / file}, where {INDEX_NAME} places it."
                )
        return {name: shards[file][name] for name, file in weight_map.items()}

    @property
    def dtype(self) -> str:
        text = self._config.get("text_config") or {}
        for config in (self._config, text):
            for key in ("dtype", "torch_dtype"):
                if isinstance(config.get(key), str):
                    return config[key].removeprefix("torch.")
        return next((e.dtype for e in self._entries.values() if len(e.shape) > 1), "float32")

    def names(self) -> Collection[str]:
        return self._entries.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._entries[name].shape

    def stored_dtype(self, name: str) -> str:
        return self._entries[name].dtype

    def file_of(self, name: str) -> Path:
        entry = self._entries.get(name)
        return entry.path if entry else self.directory

    def config(self) -> dict[str, Any]:
        return self._config

    def generation_config(self) -> dict[str, Any] | None:
        return read_json(self.directory / "generation_config.json")

    def read(self, name: str, dtype: np.dtype | None = None) -> np.ndarray:
        entry = self._entries[name]
        stored = numpy_dtype(entry.dtype)
        out = aligned_empty(entry.shape, stored)
        if not read_bytes(
            self._handle(entry.path).fileno(), entry.offset, out.reshape(-1).view(np.uint8)
        ):
            raise CheckpointError(f"{entry.path} is cut short: it ends within tensor {name}.")
        if dtype is None or dtype == stored:
            return out
        cast = aligned_empty(entry.shape, dtype)
        cast[...] = out
        return cast
