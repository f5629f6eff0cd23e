"""Brings a checkpoint's tensors to the devices, one leaf at a time.

The host holds the leaf that is being placed and a little read ahead of it; a leaf that spans devices is cut there into
its shards. On CPU a leaf that is one tensor is read into the memory that JAX then uses.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from jaxinfer.weights.plan import LeafPath, LeafSource, LoadPlan, leaf_plan
from jaxinfer.weights.quantization.layout import PARTS, Pack, StoredLayout, read_parts
from jaxinfer.weights.quantization.reader import QuantizedReader
from jaxinfer.weights.reader import CheckpointError, CheckpointReader, aligned_empty

if TYPE_CHECKING:
    import jax

READ_AHEAD_BYTES = 128 << 20
_THREADS = 2
_LISTED = 8
_CONVERTED_HINT = (
    " A converted checkpoint has the layout of one device; where that differs at this tensor_parallel_size, load the "
    "original."
)

Progress = Callable[[int], None]
"""Called with the bytes of each leaf once it is placed."""


_STORED_DEPTH = 3
"""Keys of an array's path beneath its leaf's: `PARTS`, the part's number, the array's name."""


@dataclass(frozen=True, slots=True)
class StoredLeaves:
    """The leaves that are kept as the checkpoint has them. `dtype`: of what isn't quantized among them."""

    layouts: Mapping[LeafPath, StoredLayout]
    dtype: np.dtype
    pack: Pack


def load_leaves(
    reader: CheckpointReader,
    plan: LoadPlan,
    abstract: dict[LeafPath, jax.ShapeDtypeStruct],
    *,
    ignored: Iterable[str] = (),
    progress: Progress | None = None,
    stored: StoredLeaves | None = None,
) -> dict[LeafPath, jax.Array]:
    """Every leaf of `abstract`, in its dtype and under its sharding (the default device where it has none).

    Where `stored` has a layout for a leaf of the plan, `abstract` has that leaf's arrays, at paths beneath its own.
    `ignored` are regular expressions (full match) of tensors that the model doesn't read. A checkpoint that holds
    leaves needs no plan. Raises `CheckpointError` for tensors that are missing, unexpected, or not shaped as the plan
    says.
    """
    import jax

    if reader.holds_leaves:
        plan, ignored = leaf_plan({path: leaf.shape for path, leaf in abstract.items()}), ()
    check_plan(reader, plan, abstract, ignored, stored)
    leaves = {}
    for path, host in read_leaves(reader, plan, abstract, stored):
        # A transfer holds its host memory until it is done: waiting bounds how much of that there is.
        leaves[path] = jax.block_until_ready(jax.device_put(host, abstract[path].sharding))
        if progress is not None:
            progress(host.nbytes)
        del host
    return leaves


def found_source(reader: CheckpointReader, source: LeafSource) -> LeafSource:
    """The first of a source and its alternatives that the checkpoint holds; the first of all where it holds none."""
    names, candidate = reader.names(), source
    while candidate.otherwise is not None:
        tensors = zip(candidate.names, candidate.shapes, strict=True)
        if all(name in names and reader.shape(name) == shape for name, shape in tensors):
            return candidate
        candidate = candidate.otherwise
    return candidate if all(name in names for name in candidate.names) else source


def check_plan(
    reader: CheckpointReader,
    plan: LoadPlan,
    abstract: dict[LeafPath, jax.ShapeDtypeStruct],
    ignored: Iterable[str] = (),
    stored: StoredLeaves | None = None,
) -> None:
    """Raises `CheckpointError` where checkpoint and plan don't agree, `ValueError` where plan and leaves don't."""
    leaves = _by_leaf(abstract, stored).keys()
    if plan.keys() != leaves:
        raise ValueError(f"The plan and the model differ in leaves {sorted(plan.keys() ^ leaves)}.")
    names = reader.names()
    hint = _CONVERTED_HINT if reader.holds_leaves else ""
    used: set[str] = set()
    missing = []
    for source in (found_source(reader, source) for source in plan.values()):
        for name, shape in zip(source.names, source.shapes, strict=True):
            used.add(name)
            if name not in names:
                missing.append(name)
            elif (found := reader.shape(name)) != shape:
                raise CheckpointError(
                    f"Tensor {name} in {reader.file_of(name)} has shape {found}, the model's is {shape}.{hint}"
                )
    if missing:
        where = reader.file_of(missing[0])
        raise CheckpointError(f"{where} lacks {_listed('tensor', missing)} of the model.")
    patterns = [re.compile(pattern) for pattern in (*ignored, *_ignorable(reader))]
    unexpected = [
        name
        for name in names
        if name not in used and not any(pattern.fullmatch(name) for pattern in patterns)
    ]
    if unexpected:
        where = reader.file_of(unexpected[0])
        raise CheckpointError(
            f"{where} holds {_listed('tensor', unexpected)} that the model has no place for."
        )


def _listed(noun: str, names: list[str]) -> str:
    shown = ", ".join(names[:_LISTED])
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return f"{noun}{'s' if len(names) > 1 else ''} {shown}{more}"


def read_leaves(
    reader: CheckpointReader,
    plan: LoadPlan,
    abstract: dict[LeafPath, jax.ShapeDtypeStruct],
    stored: StoredLeaves | None = None,
) -> Iterator[tuple[LeafPath, np.ndarray]]:
    """Leaves in the plan's order, in the host's memory; threads read ahead as `READ_AHEAD_BYTES` allows."""
    by_leaf = _by_leaf(abstract, stored)
    sizes = {path: sum(map(_nbytes, arrays.values())) for path, arrays in by_leaf.items()}
    todo = list(plan)
    next_read, held = 0, 0
    pending: list[tuple[LeafPath, Future[dict[LeafPath, np.ndarray]]]] = []

    def read(path: LeafPath) -> dict[LeafPath, np.ndarray]:
        if stored is not None and path in stored.layouts:
            return _read_stored(reader, plan[path], path, by_leaf[path], stored)
        return {path: _read_leaf(reader, plan[path], path, by_leaf[path][path])}

    with ThreadPoolExecutor(_THREADS, thread_name_prefix="weights") as pool:
        try:
            while pending or next_read < len(todo):
                while next_read < len(todo) and (
                    not pending or held + sizes[todo[next_read]] <= READ_AHEAD_BYTES
                ):
                    path = todo[next_read]
                    pending.append((path, pool.submit(read, path)))
                    held += sizes[path]
                    next_read += 1
                path = pending[0][0]
                arrays = pending.pop(0)[1].result()
                # Nothing here keeps the leaf once it is handed over.
                while arrays:
                    yield arrays.popitem()
                held -= sizes[path]
        finally:
            for _, future in pending:
                future.cancel()


def _nbytes(leaf: jax.ShapeDtypeStruct) -> int:
    return math.prod(leaf.shape) * leaf.dtype.itemsize


def _by_leaf(
    abstract: dict[LeafPath, jax.ShapeDtypeStruct], stored: StoredLeaves | None
) -> dict[LeafPath, dict[LeafPath, jax.ShapeDtypeStruct]]:
    """The arrays of each of the plan's leaves, itself alone where it isn't kept as the checkpoint has it."""
    layouts = {} if stored is None else stored.layouts
    found: dict[LeafPath, dict[LeafPath, jax.ShapeDtypeStruct]] = {}
    for path, leaf in abstract.items():
        owner = path[:-_STORED_DEPTH]
        found.setdefault(owner if owner in layouts else path, {})[path] = leaf
    return found


def _read_stored(
    reader: CheckpointReader,
    source: LeafSource,
    path: LeafPath,
    abstract: dict[LeafPath, jax.ShapeDtypeStruct],
    stored: StoredLeaves,
) -> dict[LeafPath, np.ndarray]:
    source, layout = found_source(reader, source), stored.layouts[path]
    found = {}
    for i, arrays in enumerate(read_parts(reader, source, layout, stored.dtype, stored.pack)):
        for name, value in arrays.items():
            where = (*path, PARTS, str(i), name)
            leaf = abstract[where]
            if (value.shape, value.dtype) != (leaf.shape, leaf.dtype):
                raise ValueError(
                    f"Leaf {'.'.join(where)} was made with {value.dtype} {value.shape}, the model's is "
                    f"{leaf.dtype} {leaf.shape}."
                )
            out = aligned_empty(value.shape, value.dtype)
            out[...] = value
            found[where] = out
    return found


def _ignorable(reader: CheckpointReader) -> tuple[str, ...]:
    return reader.ignored if isinstance(reader, QuantizedReader) else ()


def _read_leaf(
    reader: CheckpointReader, source: LeafSource, path: LeafPath, leaf: jax.ShapeDtypeStruct
) -> np.ndarray:
    dtype, source = np.dtype(leaf.dtype), found_source(reader, source)
    value = source.assemble([reader.read(name, dtype) for name in source.names])
    if value.shape != leaf.shape:
        raise ValueError(
            f"Leaf {'.'.join(path)} was assembled from {', '.join(source.names)} with shape {value.shape}, the model's "
            f"is {leaf.shape}."
        )
    if value.dtype == dtype and value.flags.c_contiguous:
        return value
    out = aligned_empty(value.shape, dtype)
    out[...] = value
    return out
