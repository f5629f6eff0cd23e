"""Which leaves of a decoder stay quantized, and how, by the load plan and what the checkpoint holds."""

from __future__ import annotations

import logging
from dataclasses import replace
from math import gcd

import numpy as np

from jaxinfer.models.functional import FunctionalDecoder, LeafRole
from jaxinfer.parallel.mesh import MESH_AXES, tensor_parallel_size
from jaxinfer.weights.loader import found_source
from jaxinfer.weights.plan import LeafPath, LeafSource, LoadPlan
from jaxinfer.weights.quantization.layout import StoredLayout, StoredPart
from jaxinfer.weights.quantization.matrix import MatrixFormat
from jaxinfer.weights.quantization.reader import QuantizedSource
from jaxinfer.weights.reader import CheckpointReader

logger = logging.getLogger(__name__)

_PACK_BLOCK = 64
_BLOCKS = {"uint4": 2, "e2m1": 2, "nf4": 2, "uint5": 8, "uint6": 4}
"""Elements whose codes share bytes, where an element's doesn't have its own."""


def stored_layouts(
    reader: CheckpointReader, plan: LoadPlan, decoder: FunctionalDecoder
) -> dict[LeafPath, StoredLayout]:
    """The layouts of the leaves that stay quantized; none of a checkpoint that isn't.

    Other leaves are dequantized when they are loaded: those that aren't just multiplied by (of latent attention what
    expands the latents; of layers with states all), and those whose groups the devices would cut to bytes.
    """
    layouts: dict[LeafPath, StoredLayout] = {}
    if not isinstance(reader, QuantizedSource):
        return layouts
    dequantized = []
    for path, role in decoder.module.roles.items():
        if path not in plan:
            continue
        source = found_source(reader, plan[path])
        formats = [reader.format_of(n) if n in reader.names() else None for n in source.names]
        if not any(formats):
            continue
        shape = decoder.module.leaves[path].shape
        layout = _layout(source, formats, shape, role, tensor_parallel_size(decoder.mesh))
        if layout is None:
            dequantized.append(".".join(path))
        else:
            layouts[path] = layout
    if dequantized:
        logger.info(
            "%d of %d quantized leaves are dequantized as they are loaded, %s the first of them",
            len(dequantized),
            len(dequantized) + len(layouts),
            dequantized[0],
        )
    return layouts


def _layout(
    source: LeafSource,
    formats: list[MatrixFormat | None],
    shape: tuple[int, ...],
    role: LeafRole,
    num_devices: int,
) -> StoredLayout | None:
    """None for a leaf that can't stay quantized."""
    if role.num_in_axes == 0:
        return None
    if any(f is not None and f.ordered for f in formats) and not _keeps_columns(source, shape):
        return None
    fitted = [None if f is None else _fitted(f, shape, role, num_devices) for f in formats]
    if any(f is not None and fit is None for f, fit in zip(formats, fitted, strict=True)):
        return None
    if len(set(fitted)) == 1:
        part = StoredPart(fitted[0], shape[0], tuple(range(len(formats))))
        return StoredLayout(shape, role.num_in_axes, (part,))
    return None if role.grouped else _joined(source, fitted, shape, role, num_devices)


def _keeps_columns(source: LeafSource, shape: tuple[int, ...]) -> bool:
    """Whether a leaf's rows have their tensors' columns in the same places."""
    columns = source.shapes[0][-1]
    numbered = [np.broadcast_to(np.arange(columns, dtype=np.int32), s) for s in source.shapes]
    value = source.assemble(numbered)
    return value.size % columns == 0 and bool(
        (value.reshape(-1, columns) == np.arange(columns)).all()
    )


def _fitted(
    form: MatrixFormat, shape: tuple[int, ...], role: LeafRole, num_devices: int
) -> MatrixFormat | None:
    """The format with groups that heads and devices don't cut, None where that leaves no whole bytes."""
    in_axes = role.axes[len(shape) - role.num_in_axes :]
    is_cut = [num_devices > 1 and a is not None and MESH_AXES[a] is not None for a in in_axes]
    # Columns in an order of their own belong to no device; experts' rows are gathered by token already.
    if form.ordered and (any(is_cut) or role.grouped):
        return None
    size = shape[-1] // (num_devices if is_cut[-1] else 1)
    if size % _BLOCKS.get(form.codes, 1):
        return None
    if role.grouped:
        # Experts multiply what comes in as it is.
        form = replace(form, activation=None, static_input=False)
    if form.group_size is None:
        return replace(form, pack_block=_pack_block(form, size, size))
    group_size = gcd(form.group_size, size)
    super_group_size = form.super_group_size and gcd(form.super_group_size, size)
    # Groups of activations are those of the checkpoint or none.
    activation = form.activation if group_size == form.group_size else None
    return replace(
        form,
        group_size=group_size,
        super_group_size=super_group_size,
        activation=activation,
        pack_block=_pack_block(form, size, group_size),
        static_input=form.static_input and activation is not None,
    )


def _pack_block(form: MatrixFormat, size: int, group_size: int) -> int | None:
    """The elements that share bytes, of an axis of `size`: `_PACK_BLOCK`, which kernels are made for, where that fits."""
    if form.codes not in _BLOCKS:
        return None
    block = gcd(size, _PACK_BLOCK)
    while group_size % block and block % group_size:
        block //= 2
    return block


def _joined(
    source: LeafSource,
    formats: list[MatrixFormat | None],
    shape: tuple[int, ...],
    role: LeafRole,
    num_devices: int,
) -> StoredLayout | None:
    """Parts along the first axis whose entries come from one tensor each, None where there is no such axis."""
    if len(formats) > np.iinfo(np.uint8).max:
        return None
    numbered = [np.broadcast_to(np.uint8(i + 1), tensor) for i, tensor in enumerate(source.shapes)]
    number_of = source.assemble(numbered)
    for axis in range(len(shape) - role.num_in_axes):
        logical = role.axes[axis]
        if num_devices > 1 and logical is not None and MESH_AXES[logical] is not None:
            continue
        entries = np.moveaxis(number_of, axis, 0).reshape(shape[axis], -1)
        last = entries.max(1)
        if ((entries != last[:, None]) & (entries != 0)).any():
            continue
        parts: list[StoredPart] = []
        for number in last:
            tensors = (int(number) - 1,) if number else ()
            form = formats[tensors[0]] if tensors else parts[-1].format if parts else formats[0]
            if parts and parts[-1].format == form:
                before = parts.pop()
                merged = tuple(dict.fromkeys((*before.tensors, *tensors)))
                parts.append(StoredPart(form, before.size + 1, merged))
            else:
                parts.append(StoredPart(form, 1, tensors))
        return StoredLayout(shape, role.num_in_axes, tuple(parts), axis)
    return None
