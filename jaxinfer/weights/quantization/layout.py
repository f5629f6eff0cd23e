"""How a leaf stays quantized in memory, and how its arrays are made from a checkpoint's."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from jaxinfer.weights.plan import LeafSource
from jaxinfer.weights.quantization.matrix import MatrixFormat, QuantizedMatrix
from jaxinfer.weights.quantization.reader import QuantizedSource
from jaxinfer.weights.reader import CheckpointError, CheckpointReader

Pack = Callable[[MatrixFormat, Mapping[str, np.ndarray]], Mapping[str, np.ndarray]]
"""Codes and numbers in numpy to the arrays in memory."""

PARTS = "parts"
"""What the parts of a leaf are called in its path: its arrays are at (*leaf, PARTS, number, name)."""

PLAIN, ORDER, INPUT_SCALE = "plain", "order", "input_scale"
"""Names of arrays beside those of a matrix: a part that isn't quantized, the order of its columns, and the scale of what it
multiplies."""


@dataclass(frozen=True, slots=True)
class StoredPart:
    """`size` entries of the axis along which parts are joined, all of one format (None: not quantized), made of the
    source's tensors `tensors`."""

    format: MatrixFormat | None
    size: int
    tensors: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StoredLayout:
    """A leaf of `shape` that is kept as the checkpoint has it: one part, or several joined along `axis`.

    `num_in_axes`: of the last axes, how many are contracted. Formats have the leaf's groups, which divide the
    checkpoint's.
    """

    shape: tuple[int, ...]
    num_in_axes: int
    parts: tuple[StoredPart, ...]
    axis: int = 0

    def part_shape(self, part: StoredPart) -> tuple[int, ...]:
        if len(self.parts) == 1:
            return self.shape
        return (*self.shape[: self.axis], part.size, *self.shape[self.axis + 1 :])


def read_parts(
    reader: CheckpointReader,
    source: LeafSource,
    layout: StoredLayout,
    dtype: np.dtype,
    pack: Pack,
) -> list[dict[str, np.ndarray]]:
    """The arrays of each part, by name. `dtype`: of what isn't quantized."""
    assert isinstance(reader, QuantizedSource)
    found, start = [], 0
    for part in layout.parts:
        window = _Window(source, layout, part, start)
        if part.format is None:
            tensors = {i: reader.read(source.names[i], dtype) for i in part.tensors}
            found.append({PLAIN: np.ascontiguousarray(window.assembled(tensors, dtype))})
        else:
            matrices = {i: reader.read_quantized(source.names[i]) for i in part.tensors}
            swapped = any(reader.transposed(source.names[i]) for i in part.tensors)
            found.append(_quantized_part(window, part.format, matrices, swapped, pack))
        start += part.size
    return found


@dataclass(frozen=True, slots=True)
class _Window:
    """What a leaf's assembly makes of a part's tensors."""

    source: LeafSource
    layout: StoredLayout
    part: StoredPart
    start: int

    def assembled(self, tensors: Mapping[int, np.ndarray], dtype: np.dtype) -> np.ndarray:
        """The part's entries; what the leaf has of other tensors is zeros meanwhile."""
        shapes, layout = self.source.shapes, self.layout
        zero = np.zeros((), dtype)
        every = [tensors.get(i, np.broadcast_to(zero, shapes[i])) for i in range(len(shapes))]
        value = self.source.assemble(every)
        if value.shape != layout.shape:
            raise ValueError(
                f"{', '.join(self.source.names)} were assembled with shape {value.shape}, the model's is {layout.shape}."
            )
        if len(layout.parts) == 1:
            return value
        return np.moveaxis(
            np.moveaxis(value, layout.axis, 0)[self.start : self.start + self.part.size],
            0,
            layout.axis,
        )


def _quantized_part(
    window: _Window,
    form: MatrixFormat,
    matrices: Mapping[int, QuantizedMatrix],
    swapped: bool,
    pack: Pack,
) -> dict[str, np.ndarray]:
    num_in_axes = window.layout.num_in_axes

    def spread(name: str) -> np.ndarray:
        """Each column with its group's number, as an assembly moves single columns."""
        tensors = {}
        for i, matrix in matrices.items():
            value = matrix.arrays[name]
            if value.ndim < len(matrix.shape):
                value = value[..., None]
            value = np.repeat(value, matrix.shape[-1] // value.shape[-1], axis=-1)
            tensors[i] = value.swapaxes(-1, -2) if swapped else value
        return window.assembled(tensors, next(iter(tensors.values())).dtype)

    sizes = {
        name: form.super_group_size if "super" in name else form.group_size
        for name in _all(matrices)
    }
    arrays = {}
    for name, size in sizes.items():
        value = spread(name)
        if name == "codes":
            arrays[name] = np.ascontiguousarray(value)
        elif size is None:
            flat = value.reshape(*value.shape[: value.ndim - num_in_axes], -1)
            # Of padding, which comes last, scales are zeros.
            arrays[name] = np.ascontiguousarray(flat[..., 0])
        else:
            groups = value.reshape(*value.shape[:-1], -1, size)
            if (groups != groups[..., :1]).any():
                raise CheckpointError(
                    f"{', '.join(window.source.names)}: groups of inputs don't stay together in this architecture's layout; "
                    "load it with dequantize=True."
                )
            arrays[name] = np.ascontiguousarray(groups[..., 0])
    packed = dict(pack(form, arrays))
    if form.ordered:
        packed[ORDER] = _common_order(window, matrices)
    if form.static_input:
        # As vLLM has it for fused projections: what one of them needs, all can take.
        scales = [m.input_scale for m in matrices.values() if m.input_scale is not None]
        packed[INPUT_SCALE] = np.max(scales).astype(np.float32)
    return packed


def _all(matrices: Mapping[int, QuantizedMatrix]) -> Sequence[str]:
    return list(next(iter(matrices.values())).arrays)


def _common_order(window: _Window, matrices: Mapping[int, QuantizedMatrix]) -> np.ndarray:
    """[columns] int32, of which input each column of the leaf takes."""
    orders = {i: matrix.order for i, matrix in matrices.items()}
    first_index, first = next(iter(orders.items()))
    assert first is not None
    for i, order in orders.items():
        if not np.array_equal(order, first):
            one, other = window.source.names[first_index], window.source.names[i]
            raise CheckpointError(
                f"{one} and {other} are one leaf here, but their inputs are in different orders (g_idx); load the "
                "checkpoint with dequantize=True."
            )
    return first
