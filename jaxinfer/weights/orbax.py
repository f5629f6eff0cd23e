"""Checkpoints of the model's own leaves, fused as they are used: nothing to dequantize or rearrange when they load.

Written by orbax-checkpoint, one uncompressed Zarr array in one chunk for each leaf (bfloat16 weights hardly compress).
Such an array is a file of plain bytes, which is read as it is: importing Orbax takes 2 s, longer than to read a small
model, and TensorStore copies once more.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxinfer.weights.plan import LeafPath, LoadPlan
from jaxinfer.weights.reader import (
    CheckpointError,
    CheckpointReader,
    aligned_empty,
    numpy_dtype,
    read_bytes,
)
from jaxinfer.weights.resolve import ORBAX_MARKER
from jaxinfer.weights.safetensors import read_json

if TYPE_CHECKING:
    import jax

_LEAVES = "leaves"
_FORMAT = 1


class OrbaxReader:
    """A `CheckpointReader` whose tensors are leaves, named by their path joined with dots."""

    holds_leaves = True

    def __init__(self, directory: Path) -> None:
        marker = read_json(directory / ORBAX_MARKER)
        config = read_json(directory / "config.json")
        if marker is None or config is None:
            raise CheckpointError(
                f"{directory} needs {ORBAX_MARKER} and config.json to be a converted checkpoint."
            )
        if marker.get("format") != _FORMAT:
            raise CheckpointError(
                f"{directory} has format {marker.get('format')!r}, this version reads {_FORMAT}: convert again."
            )
        self.directory = directory
        self._config = config
        self._shapes = {name: tuple(shape) for name, shape in marker["shapes"].items()}
        self._dtype = marker["dtype"]

    @property
    def dtype(self) -> str:
        return self._dtype

    def names(self) -> Collection[str]:
        return self._shapes.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name]

    def file_of(self, name: str) -> Path:
        return self.directory / _LEAVES

    def config(self) -> dict[str, Any]:
        return self._config

    def generation_config(self) -> dict[str, Any] | None:
        return read_json(self.directory / "generation_config.json")

    def _chunk(self, name: str) -> tuple[Path, np.dtype]:
        """The file that is all of a leaf, little-endian and in C order, and its dtype."""
        shape = self._shapes[name]
        array = read_json(self.directory / _LEAVES / name / ".zarray")
        if array is None:
            raise CheckpointError(f"Leaf {name} is missing in {self.directory / _LEAVES}.")
        # https://zarr-specs.readthedocs.io/en/latest/v2/v2.0.html
        whole = {"shape": list(shape), "chunks": list(shape), "compressor": None, "order": "C"}
        if any(array.get(key) != value for key, value in whole.items()) or array.get("filters"):
            raise CheckpointError(
                f"Leaf {name} in {self.directory / _LEAVES} is not stored in one piece as {shape}: convert again."
            )
        path = self.directory / _LEAVES / name / ".".join("0" for _ in shape)
        return path, numpy_dtype(array["dtype"])

    def read(self, name: str, dtype: np.dtype | None = None) -> np.ndarray:
        path, stored = self._chunk(name)
        out = aligned_empty(self._shapes[name], stored)
        try:
            with path.open("rb") as file:
                is_whole = read_bytes(file.fileno(), 0, out.reshape(-1).view(np.uint8))
        except FileNotFoundError as error:
            raise CheckpointError(f"Leaf {name}: {path} is missing.") from error
        if not is_whole:
            raise CheckpointError(
                f"{path} is cut short: leaf {name} takes {out.nbytes} bytes, the file has {path.stat().st_size}."
            )
        if dtype is None or dtype == stored:
            return out
        cast = aligned_empty(out.shape, dtype)
        cast[...] = out
        return cast


def check_new_directory(out: Path) -> None:
    """Raises `ValueError` where `out` exists and isn't an empty directory."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"{out} exists already; name a new directory.")


def save_leaves(
    out: Path,
    reader: CheckpointReader,
    plan: LoadPlan,
    abstract: dict[LeafPath, jax.ShapeDtypeStruct],
    *,
    ignored: Collection[str] = (),
) -> None:
    """Write the leaves that `plan` makes of the checkpoint to the directory `out`, with both configurations.

    The host holds the whole model meanwhile. Raises `ValueError` where `out` exists and isn't an empty directory,
    `CheckpointError` for a checkpoint that doesn't fit the plan.
    """
    from jaxinfer.weights.loader import check_plan, read_leaves

    if reader.holds_leaves:
        raise ValueError("The checkpoint is a converted one already.")
    check_new_directory(out)
    check_plan(reader, plan, abstract, ignored)
    import orbax.checkpoint as ocp

    leaves = {".".join(path): leaf for path, leaf in read_leaves(reader, plan, abstract)}
    out.mkdir(parents=True, exist_ok=True)
    try:
        with ocp.PyTreeCheckpointer(
            use_ocdbt=False, use_zarr3=False, use_compression=False
        ) as checkpointer:
            checkpointer.save((out / _LEAVES).resolve(), leaves)
        dtype = max(leaves.values(), key=lambda leaf: leaf.size).dtype.name
        config = {k: v for k, v in reader.config().items() if k != "quantization_config"}
        _write_json(out / "config.json", config | {"dtype": dtype})
        if (generation := reader.generation_config()) is not None:
            _write_json(out / "generation_config.json", generation)
        shapes = {name: list(leaf.shape) for name, leaf in leaves.items()}
        # Last: what has no marker was not finished.
        _write_json(out / ORBAX_MARKER, {"format": _FORMAT, "dtype": dtype, "shapes": shapes})
    except BaseException:
        shutil.rmtree(out, ignore_errors=True)
        raise


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
