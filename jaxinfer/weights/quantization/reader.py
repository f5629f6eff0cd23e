"""A quantized checkpoint under the names that it would have if it were not."""

from __future__ import annotations

import re
from collections.abc import Collection
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np

from jaxinfer.weights.quantization.config import QuantizationConfig
from jaxinfer.weights.quantization.matrix import MatrixFormat, QuantizedMatrix
from jaxinfer.weights.quantization.scheme import Scheme
from jaxinfer.weights.quantization.tensors import ModuleTensors
from jaxinfer.weights.reader import CheckpointReader, StoredReader, aligned_empty, numpy_dtype

_QUANTIZED_DTYPES = ("int8", "float8_e4m3fn")


@runtime_checkable
class QuantizedSource(Protocol):
    """A `CheckpointReader` some of whose matrices can be had as they are stored."""

    @property
    def quantization(self) -> str:
        """The method by which users know it."""
        ...

    def format_of(self, name: str) -> MatrixFormat | None:
        """None for a tensor that isn't quantized, or can't be had quantized."""
        ...

    def read_quantized(self, name: str) -> QuantizedMatrix:
        """The tensor, or with `transposed(name)` its last two axes exchanged."""
        ...

    def transposed(self, name: str) -> bool: ...


class QuantizedReader:
    """A `CheckpointReader` and a `QuantizedSource` over the tensors of a Hugging Face directory.

    The first question about tensors finds the quantized modules, and raises `CheckpointError` for those of which tensors
    are missing or of the wrong shape.
    """

    holds_leaves = False

    def __init__(self, stored: StoredReader, config: QuantizationConfig) -> None:
        self._stored, self._config = stored, config

    @property
    def quantization(self) -> str:
        return self._config.method

    @property
    def dtype(self) -> str:
        return self._stored.dtype

    @cached_property
    def _quantized(self) -> dict[str, tuple[Scheme, ModuleTensors]]:
        """The quantized modules by their weights' names."""
        found = {}
        suffixes = {scheme.weight for _, scheme in self._config.schemes}
        names = self._stored.names()
        for name in names:
            for suffix in suffixes:
                if not name.endswith(suffix):
                    continue
                tensors = ModuleTensors(self._stored, name.removesuffix(suffix))
                scheme = self._scheme_of(tensors, suffix)
                if scheme is not None:
                    found[tensors.name(scheme.logical)] = scheme, tensors
        return found

    def _scheme_of(self, tensors: ModuleTensors, suffix: str) -> Scheme | None:
        scheme = self._config.scheme_of(tensors.module)
        is_quantized = suffix != ".weight" or tensors.dtype(suffix) in _QUANTIZED_DTYPES
        if not is_quantized:
            # A module that the config doesn't leave out and yet holds plain numbers.
            return None
        if scheme is None or scheme.weight != suffix:
            tensors.fail(suffix, "is quantized, but quantization_config doesn't say how")
        return scheme

    @cached_property
    def _names(self) -> frozenset[str]:
        names = set(self._stored.names())
        for scheme, tensors in self._quantized.values():
            names.difference_update(
                tensors.name(suffix) for suffix in (scheme.weight, *scheme.others)
            )
        return frozenset(names | self._quantized.keys())

    @cached_property
    def ignored(self) -> tuple[str, ...]:
        """Regular expressions of biases that quantizers write where a model has none: all zeros."""
        if self._config.method != "gptq":
            return ()
        biases = [tensors.name(".bias") for _, tensors in self._quantized.values()]
        names = self._stored.names()
        return tuple(
            re.escape(name)
            for name in biases
            if name in names and not self._stored.read(name).any()
        )

    def names(self) -> Collection[str]:
        return self._names

    def shape(self, name: str) -> tuple[int, ...]:
        if name not in self._quantized:
            return self._stored.shape(name)
        scheme, tensors = self._quantized[name]
        shape = scheme.shape(tensors)
        return (*shape[:-2], shape[-1], shape[-2]) if self.transposed(name) else shape

    def file_of(self, name: str) -> Path:
        if name in self._quantized:
            scheme, tensors = self._quantized[name]
            name = tensors.name(scheme.weight)
        return self._stored.file_of(name)

    def read(self, name: str, dtype: np.dtype | None = None) -> np.ndarray:
        if name not in self._quantized:
            return self._stored.read(name, dtype)
        matrix = self.read_quantized(name)
        dtype = numpy_dtype("float32") if dtype is None else dtype
        out = matrix.dequantize(aligned_empty(matrix.shape, dtype))
        return out.swapaxes(-1, -2) if self.transposed(name) else out

    def format_of(self, name: str) -> MatrixFormat | None:
        if name not in self._quantized:
            return None
        scheme, tensors = self._quantized[name]
        return scheme.format(tensors)

    def read_quantized(self, name: str) -> QuantizedMatrix:
        scheme, tensors = self._quantized[name]
        return scheme.read(tensors)

    def transposed(self, name: str) -> bool:
        return name in self._quantized and self._quantized[name][0].transposed

    def config(self) -> dict[str, Any]:
        return self._stored.config()

    def generation_config(self) -> dict[str, Any] | None:
        return self._stored.generation_config()


def quantization_of(reader: CheckpointReader) -> str | None:
    """The method by which a checkpoint is quantized."""
    return reader.quantization if isinstance(reader, QuantizedSource) else None


def check_quantization(asked: str | None, found: str | None) -> None:
    """Raises `ValueError` where a user's `quantization` is not how the checkpoint is quantized."""
    if asked is not None and asked != found:
        holds = "is not quantized" if found is None else f"is quantized with {found!r}"
        raise ValueError(f"quantization is {asked!r}, but the checkpoint {holds}.")
