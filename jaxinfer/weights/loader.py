"""Brings a checkpoint's tensors to the devices, one leaf at a time.

The host holds the leaf that is being placed and a little read ahead of it; a leaf that spans devices is cut there into
its shards. On CPU a leaf that is one tensor is read into the memory that JAX then uses.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np

from jaxinfer.weights.plan import LeafPath, LeafSource, LoadPlan, leaf_plan
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


def load_leaves(
    reader: CheckpointReader,
    plan: LoadPlan,
    abstract: dict[LeafPath, jax.ShapeDtypeStruct],
    *,
    ignored: Iterable[str] = (),
    progress: Progress | None = None,
) -> dict[LeafPath, jax.Array]:
    """Every leaf of `abstract`, in its dtype and under its sharding (the default device where it has none).

    `ignored` are regular expressions (full match) of tensors that the model doesn't read. A checkpoint that holds
    leaves needs no plan. Raises `CheckpointError` for tensors that are missing, unexpected, or not shaped as the plan
    says.
    """
    import jax

    if reader.holds_leaves:
        plan, ignored = leaf_plan({path: leaf.shape for path, leaf in abstract.items()}), ()
    check_plan(reader, plan, abstract, ignored)
    leaves = {}
    for path, host in read_leaves(reader, plan, abstract):
        # A transfer holds its host memory until it is done: waiting bounds how much of that there is.
        leaves[path] = jax.block_until_ready(jax.device_put(host, abstract[path].sharding))
        if progress is not None:
            progress(host.nbytes)
        del host
    return leaves


def _found(reader: CheckpointReader, source: LeafSource) -> LeafSource:
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
) -> None:
    """Raises `CheckpointError` where checkpoint and plan don't agree, `ValueError` where plan and leaves don't."""
    if plan.keys() != abstract.keys():
        raise ValueError(
            f"The plan and the model differ in leaves {sorted(plan.keys() ^ abstract.keys())}."
        )
    names = reader.names()
    hint = _CONVERTED_HINT if reader.holds_leaves else ""
    used: set[str] = set()
    missing = []
    for source in (_found(reader, source) for source in plan.values()):
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
    patterns = [re.compile(pattern) for pattern in ignored]
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
    reader: CheckpointReader, plan: LoadPlan, abstract: dict[LeafPath, jax.ShapeDtypeStruct]
) -> Iterator[tuple[LeafPath, np.ndarray]]:
    """Leaves in the plan's order, in the host's memory; threads read ahead as `READ_AHEAD_BYTES` allows."""
    sizes = {path: math.prod(leaf.shape) * leaf.dtype.itemsize for path, leaf in abstract.items()}
    todo = list(plan)
    next_read, held = 0, 0
    pending: list[tuple[LeafPath, Future[np.ndarray]]] = []
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="weights") as pool:
        try:
            while pending or next_read < len(todo):
                while next_read < len(todo) and (
                    not pending or held + sizes[todo[next_read]] <= READ_AHEAD_BYTES
                ):
                    path = todo[next_read]
                    pending.append(
                        (path, pool.submit(_read_leaf, reader, plan[path], path, abstract[path]))
                    )
                    held += sizes[path]
                    next_read += 1
                path = pending[0][0]
                # Nothing here keeps the leaf once it is handed over.
                yield path, pending.pop(0)[1].result()
                held -= sizes[path]
        finally:
            for _, future in pending:
                future.cancel()


def _read_leaf(
    reader: CheckpointReader, source: LeafSource, path: LeafPath, leaf: jax.ShapeDtypeStruct
) -> np.ndarray:
    dtype, source = np.dtype(leaf.dtype), _found(reader, source)
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
