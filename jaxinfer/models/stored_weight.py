"""Weights that stay as their checkpoint has them: quantized, and possibly in parts of several formats."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, PartitionSpec

from jaxinfer.parallel.mesh import MESH_AXES, MODEL_AXIS, LogicalAxes, partition_spec
from jaxinfer.weights.plan import LeafPath
from jaxinfer.weights.quantization.layout import INPUT_SCALE, ORDER, PLAIN, StoredLayout
from jaxinfer.weights.quantization.matrix import MatrixFormat
from kernels_pallas import quantized_matmul
from kernels_pallas.quantized_matmul.format import WeightFormat
from kernels_pallas.quantized_matmul.weight import (
    QuantizedWeight,
    dequantize,
    pack,
    take_rows,
)

Part = QuantizedWeight | jax.Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StoredWeight:
    """A weight [*out, *in], the last `num_in_axes` axes contracted: one part, or several joined along `axis`, of `out`.

    `orders`, where given: [in] int32, which input each column of a part multiplies. `mesh`: None inside a `shard_map`,
    and on one device.
    """

    parts: tuple[Part, ...]
    orders: tuple[jax.Array | None, ...]
    axis: int = field(metadata={"static": True})
    num_in_axes: int = field(metadata={"static": True})
    axes: LogicalAxes = field(metadata={"static": True})
    mesh: Mesh | None = field(metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        shape = list(self.parts[0].shape)
        shape[self.axis] = sum(part.shape[self.axis] for part in self.parts)
        return tuple(shape)

    @property
    def ndim(self) -> int:
        return self.parts[0].ndim

    @property
    def dtype(self) -> np.dtype:
        return self.parts[0].dtype

    @property
    def local(self) -> StoredWeight:
        """Of arrays that are one device's shards."""
        return replace(self, mesh=None)

    def sole(self) -> QuantizedWeight:
        """Of a weight that is one quantized part, with its inputs in order."""
        (part,), (order,) = self.parts, self.orders
        assert isinstance(part, QuantizedWeight) and order is None
        return part

    def partition_specs(self) -> StoredWeight:
        """The `PartitionSpec` of each array, for `jax.shard_map`."""

        def spec(part: Part) -> Any:
            if not isinstance(part, QuantizedWeight):
                return partition_spec(self.axes)
            specs = part.map_arrays(lambda x: partition_spec(self.axes[: x.ndim]))
            return (
                specs if part.input_scale is None else replace(specs, input_scale=PartitionSpec())
            )

        orders = tuple(None if order is None else PartitionSpec() for order in self.orders)
        return replace(self, parts=tuple(map(spec, self.parts)), orders=orders)

    def take_rows(self, ids: jax.Array) -> jax.Array:
        """The rows `ids` [T] of a matrix, dequantized; those beyond its ends are its last."""
        weight = self.sole()
        return dequantize(take_rows(weight, jnp.clip(ids, 0, self.shape[0] - 1)))

    def matmul(self, x: jax.Array, dtype: jnp.dtype) -> jax.Array:
        """[T, *in] -> [T, *out] in `dtype`."""
        num_out_axes = self.ndim - self.num_in_axes
        if self.mesh is None:
            return self._product(x.reshape(x.shape[0], -1), dtype)
        in_axes, out_axes = self.axes[num_out_axes:], self.axes[:num_out_axes]
        is_cut = any(axis is not None and MESH_AXES[axis] == MODEL_AXIS for axis in in_axes)

        def of_shard(x: jax.Array, weight: StoredWeight) -> jax.Array:
            out = weight.local._product(x.reshape(x.shape[0], -1), dtype)
            return jax.lax.psum(out, MODEL_AXIS) if is_cut else out

        return jax.shard_map(
            of_shard,
            mesh=self.mesh,
            in_specs=(partition_spec((None, *in_axes)), self.partition_specs()),
            out_specs=partition_spec((None, *out_axes)),
            check_vma=False,
        )(x.reshape(x.shape[0], *self.shape[num_out_axes:]), self)

    def _product(self, x_ti: jax.Array, dtype: jnp.dtype) -> jax.Array:
        products = []
        for part, order in zip(self.parts, self.orders, strict=True):
            x = x_ti if order is None else x_ti[:, order]
            out_shape = part.shape[: part.ndim - self.num_in_axes]
            if isinstance(part, QuantizedWeight):
                out = quantized_matmul(x, part, num_in_axes=self.num_in_axes, dtype=dtype)
            else:
                exact = part.dtype == jnp.float32
                out = jax.lax.dot_general(
                    x,
                    part.reshape(prod(out_shape), -1),
                    (((1,), (1,)), ((), ())),
                    precision=jax.lax.Precision.HIGHEST if exact else None,
                    preferred_element_type=dtype,
                )
            products.append(out.reshape(x.shape[0], *out_shape))
        return products[0] if len(products) == 1 else jnp.concatenate(products, self.axis + 1)


class _StoredPart(nnx.Module):
    """The arrays of a part, each a leaf."""


class StoredLeaf(nnx.Module):
    """Stands where a leaf would, with leaves of its own: `{leaf}.parts.{number}.{array}`."""

    def __init__(self, layout: StoredLayout, axes: LogicalAxes, mesh: Mesh, dtype: jnp.dtype):
        self.layout, self.axes, self.mesh, self.dtype_name = layout, axes, mesh, dtype.name
        parts = []
        for part in layout.parts:
            module = _StoredPart()
            for name, array in part_arrays(layout, part, dtype).items():
                is_whole = name in (ORDER, INPUT_SCALE)
                array_axes = (None,) * array.ndim if is_whole else axes[: array.ndim]
                param = nnx.Param(
                    jnp.zeros(array.shape, array.dtype),
                    logical_axes=array_axes,
                    num_in_axes=0,
                    grouped=False,
                )
                setattr(module, name, param)
            parts.append(module)
        self.parts = nnx.List(parts)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.layout.shape

    def __getitem__(self, index: object) -> StoredWeight:
        """`leaf[...]`, as of a leaf that is one array."""
        assert index is Ellipsis
        names = [part_arrays(self.layout, part, self._dtype) for part in self.layout.parts]
        arrays = [
            {name: getattr(part, name)[...] for name in found}
            for part, found in zip(self.parts, names, strict=True)
        ]
        return stored_weight(self.layout, self.axes, self.mesh, self._dtype, arrays)

    @property
    def _dtype(self) -> jnp.dtype:
        return jnp.dtype(self.dtype_name)


def store_leaf(
    module: nnx.Module, path: LeafPath, layout: StoredLayout, mesh: Mesh, dtype: jnp.dtype
) -> None:
    """Put a `StoredLeaf` in the place of the module's leaf at `path`."""
    *parents, name = path
    for key in parents:
        module = module[int(key)] if key.isdecimal() else getattr(module, key)
    setattr(module, name, StoredLeaf(layout, getattr(module, name).logical_axes, mesh, dtype))


def weight_format(form: MatrixFormat, dtype: jnp.dtype) -> WeightFormat:
    return WeightFormat(dtype=dtype.name, **form.weight_fields())


def part_arrays(layout: StoredLayout, part: Any, dtype: jnp.dtype) -> dict[str, Any]:
    """Shape and dtype of each array of a part, as `jax.ShapeDtypeStruct`."""
    shape = layout.part_shape(part)
    if part.format is None:
        return {PLAIN: jax.ShapeDtypeStruct(shape, dtype)}
    arrays = weight_format(part.format, dtype).arrays(shape, layout.num_in_axes)
    if part.format.ordered:
        columns = prod(shape[len(shape) - layout.num_in_axes :])
        arrays[ORDER] = jax.ShapeDtypeStruct((columns,), jnp.int32)
    return arrays


def stored_weight(
    layout: StoredLayout,
    axes: LogicalAxes,
    mesh: Mesh,
    dtype: jnp.dtype,
    arrays: Sequence[Mapping[str, Any]],
) -> StoredWeight:
    """The weight of a leaf, given the arrays of its parts."""
    parts, orders = [], []
    for part, found in zip(layout.parts, arrays, strict=True):
        found = dict(found)
        orders.append(found.pop(ORDER, None))
        if part.format is None:
            parts.append(found[PLAIN])
        else:
            parts.append(QuantizedWeight(weight_format(part.format, dtype), **found))
    on_mesh = mesh if mesh.size > 1 else None
    return StoredWeight(tuple(parts), tuple(orders), layout.axis, layout.num_in_axes, axes, on_mesh)


def pack_part(form: MatrixFormat, arrays: Mapping[str, np.ndarray]) -> Mapping[str, np.ndarray]:
    """`jaxinfer.weights.quantization.layout.Pack`"""
    return pack(weight_format(form, jnp.dtype(jnp.float32)), arrays)
