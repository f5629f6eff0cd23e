"""What a checkpoint looks like to the loader, whatever its format."""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path
from typing import Any, Protocol

import numpy as np


class CheckpointError(ValueError):
    """A checkpoint that can't be read as it should: the message names the tensor and the file."""


class CheckpointReader(Protocol):
    """Tensors by their Hugging Face names, and the model's configuration as Hugging Face writes it.

    `read` brings one tensor into memory and keeps nothing of it; it may be called from several threads.
    """

    @property
    def holds_leaves(self) -> bool:
        """Whether the tensors are the model's own leaves as they are on one device, not a Hugging Face checkpoint's."""
        ...

    @property
    def dtype(self) -> str:
        """Name of the dtype in which the checkpoint's matrices are meant to be used."""
        ...

    def names(self) -> Collection[str]: ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def file_of(self, name: str) -> Path:
        """The file that holds (or should hold) the tensor."""
        ...

    def read(self, name: str, dtype: np.dtype | None = None) -> np.ndarray:
        """The tensor in `dtype`, or as it is stored (float32 where it is stored quantized).

        Raises `CheckpointError` where the file ends too early.
        """
        ...

    def config(self) -> dict[str, Any]: ...

    def generation_config(self) -> dict[str, Any] | None: ...


class StoredReader(CheckpointReader, Protocol):
    """A reader of tensors as they are."""

    def stored_dtype(self, name: str) -> str:
        """Name of the tensor's dtype."""
        ...


def numpy_dtype(name: str) -> np.dtype:
    """numpy's dtype of a name such as "bfloat16", which numpy only knows through `ml_dtypes`."""
    if name == "bfloat16" or name.startswith("float8"):
        import ml_dtypes

        return np.dtype(getattr(ml_dtypes, name))
    return np.dtype(name)


def aligned_empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """An uninitialised array at a multiple of 64 bytes: `jax.device_put` on CPU takes such memory without a copy."""
    size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    raw = np.empty(size + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + size].view(dtype).reshape(shape)


def read_bytes(fd: int, offset: int, out: np.ndarray) -> bool:
    """Fill `out` (uint8, contiguous) from the file at `offset`; False where the file ends before.

    Plain reads rather than a memory map: pages of a map count as the process's memory until they are dropped, and a
    file that shrinks under a map kills the process.
    """
    view = memoryview(out).cast("B")
    done = 0
    while done < len(view):
        count = os.preadv(fd, [view[done : done + (1 << 30)]], offset + done)
        if count == 0:
            return False
        done += count
    return True
