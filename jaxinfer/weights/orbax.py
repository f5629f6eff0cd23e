"""Checkpoints of the model's own leaves, fused as they are used: nothing to dequantize or rearrange when they load.

Written by orbax-checkpoint, read through TensorStore, the format beneath it: importing Orbax takes longer than reading
a small model. Arrays are stored uncompressed, as bfloat16 weights hardly compress.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Collection
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxinfer.weights.plan import LeafPath, LoadPlan
from jaxinfer.weights.reader import CheckpointError, CheckpointReader, aligned_empty, numpy_dtype
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

    @cached_property
    def _context(self) -> Any:
        import tensorstore

        # No cache: everything is read once.
        return tensorstore.Context({"cache_pool": {"total_bytes_limit": 0}})

    def read(self, name: str, dtype: np.dtype | None = None) -> np.ndarray:
        import tensorstore

        base = (self.directory / _LEAVES).resolve()
        spec = {
            "driver": "zarr3",
            "kvstore": {"driver": "ocdbt", "base": base.as_uri(), "path": f"{name}/"},
        }
        try:
            store = tensorstore.open(spec, open=True, read=True, context=self._context).result()
            out = aligned_empty(tuple(store.shape), numpy_dtype(store.dtype.name))
            tensorstore.array(out, copy=False).write(store).result()
        except ValueError as error:
            raise CheckpointError(f"Leaf {name} in {base} can't be read: {error}") from error
        if out.shape != self._shapes[name]:
            raise CheckpointError(
                f"Leaf {name} in {base} has shape {out.shape}, {ORBAX_MARKER} says {self._shapes[name]}."
            )
        if dtype is None or dtype == out.dtype:
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
            use_ocdbt=True, use_zarr3=True, use_compression=False
        ) as checkpointer:
            checkpointer.save((out / _LEAVES).resolve(), leaves)
        dtype = max(leaves.values(), key=lambda leaf: leaf.size).dtype.name
        _write_json(out / "config.json", reader.config() | {"dtype": dtype})
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
