"""The tensors of one quantized module, with errors that name them."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import NoReturn

import numpy as np

from jaxinfer.weights.reader import CheckpointError, StoredReader

FLOATS = ("float16", "bfloat16", "float32")
"""Dtypes of scales."""


@dataclass(frozen=True, slots=True)
class ModuleTensors:
    """The tensors `{module}{suffix}` of a checkpoint. Every fault raises `CheckpointError`."""

    reader: StoredReader
    module: str

    def name(self, suffix: str) -> str:
        return self.module + suffix

    def has(self, suffix: str) -> bool:
        return self.name(suffix) in self.reader.names()

    def shape(self, suffix: str) -> tuple[int, ...]:
        self._need(suffix)
        return self.reader.shape(self.name(suffix))

    def matrix_shape(self, suffix: str) -> tuple[int, int]:
        shape = self.shape(suffix)
        if len(shape) != 2:
            self.fail(suffix, f"has shape {shape}; a matrix is expected")
        return shape[0], shape[1]

    def dtype(self, suffix: str) -> str:
        self._need(suffix)
        return self.reader.stored_dtype(self.name(suffix))

    def float_dtype(self, suffix: str) -> str:
        found = self.dtype(suffix)
        if found not in FLOATS:
            self.fail(suffix, f"has dtype {found}; supported: {', '.join(FLOATS)}")
        return found

    def read(
        self,
        suffix: str,
        shape: tuple[int, ...] | None = None,
        dtypes: Collection[str] | None = None,
    ) -> np.ndarray:
        """The tensor as it is stored, of this shape and one of these dtypes where they are given."""
        found = self.shape(suffix)
        if shape is not None and found != shape:
            self.fail(suffix, f"has shape {found}, expected {shape}")
        if dtypes is not None and (stored := self.dtype(suffix)) not in dtypes:
            self.fail(suffix, f"has dtype {stored}; supported: {', '.join(dtypes)}")
        return self.reader.read(self.name(suffix))

    def scalar(self, suffix: str) -> np.ndarray:
        """[] float32"""
        value = self.read(suffix)
        if value.size != 1:
            self.fail(suffix, f"has shape {value.shape}; one number is expected")
        return value.reshape(()).astype(np.float32)

    def group_order(self, suffix: str, columns: int, group_size: int) -> np.ndarray:
        """[columns] int32, the inputs by group, and within a group as they come. The tensor has each input's group."""
        index = self.read(suffix, (columns,), ("int32", "int64"))
        groups = columns // group_size
        if index.min() < 0 or index.max() >= groups:
            self.fail(
                suffix, f"holds {index.min()} to {index.max()}, the groups are 0 to {groups - 1}"
            )
        counts = np.bincount(index, minlength=groups)
        if (counts != group_size).any():
            uneven = int(np.flatnonzero(counts != group_size)[0])
            given = counts[uneven]
            self.fail(suffix, f"gives group {uneven} {given} inputs, group_size is {group_size}")
        return np.argsort(index, kind="stable").astype(np.int32)

    def fail(self, suffix: str, what: str) -> NoReturn:
        name = self.name(suffix)
        raise CheckpointError(f"Tensor {name} in {self.reader.file_of(name)} {what}.")

    def _need(self, suffix: str) -> None:
        if not self.has(suffix):
            name = self.name(suffix)
            raise CheckpointError(
                f"{self.reader.file_of(name)} lacks tensor {name} of the quantized {self.module}."
            )
