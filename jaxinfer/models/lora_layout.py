"""Which matrices of a checkpoint adapters may change, and where their updates go among the decoder's leaves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.models.functional import FunctionalDecoder
from jaxinfer.models.lora import AdapterStacks, LowRankStack
from jaxinfer.models.spec import AttentionSpec, GatedMlpSpec, LayerSpec, PlainMlpSpec
from jaxinfer.parallel.mesh import LogicalAxes, named_sharding
from jaxinfer.weights.plan import LeafSource, LoadPlan


@dataclass(frozen=True, slots=True)
class _LeafAxes:
    """Logical axes of a leaf that takes updates, and along which of `out` its sources lie next to each other."""

    out: LogicalAxes
    into: LogicalAxes
    joined: int = 0


_ATTENTION = {
    "qkv": _LeafAxes(("kv_heads", "heads", None), ("embed",), joined=1),
    "gate": _LeafAxes(("kv_heads", "heads", None), ("embed",)),
    "o": _LeafAxes(("embed",), ("kv_heads", "heads", None)),
}
_MLP = {
    "gate_up": _LeafAxes((None, "mlp"), ("embed",)),
    "up": _LeafAxes(("mlp",), ("embed",)),
    "down": _LeafAxes(("embed",), ("mlp",)),
}


@dataclass(frozen=True, slots=True)
class _Gather:
    """Of a matrix [out, in] in a checkpoint, its rows and columns at each place of the leaf that is made of it, -1 for
    padding: `rows` [*out], `columns` [*in]."""

    shape: tuple[int, int]
    rows: np.ndarray
    columns: np.ndarray


@dataclass(frozen=True, slots=True)
class Place:
    """A checkpoint's matrix is source number `source` of a layer's leaf."""

    layer: int
    leaf: str
    source: int
    gather: _Gather

    @property
    def shape(self) -> tuple[int, int]:
        """[out, in]"""
        return self.gather.shape

    def a(self, a_ri: np.ndarray) -> np.ndarray:
        """[r, in] -> [r, *in of the leaf]"""
        return _taken(a_ri, self.gather.columns)

    def b(self, b_or: np.ndarray) -> np.ndarray:
        """[out, r] -> [r, *out of the leaf]"""
        return _taken(b_or.T, self.gather.rows)


def _taken(x: np.ndarray, index: np.ndarray) -> np.ndarray:
    """[r, n], [*m] -> [r, *m]"""
    return np.where(index < 0, 0, x[:, np.maximum(index, 0)])


@dataclass(frozen=True, slots=True)
class AdapterLayout:
    """`places`: by the name of the checkpoint's module, one place per leaf that is made of it. `shapes`: of the stacks."""

    places: Mapping[str, list[Place]]
    shapes: AdapterStacks

    @classmethod
    def create(
        cls,
        decoder: FunctionalDecoder,
        plan: LoadPlan,
        num_slots: int,
        rank: int,
        dtype: jnp.dtype,
    ) -> AdapterLayout:
        """`plan` says what the checkpoint's tensors are called. Raises `ValueError` for a model without any matrix that
        adapters may change."""
        places: dict[str, list[Place]] = {}
        shapes: list[dict[str, LowRankStack]] = []
        # Equal layers are assembled equally.
        known: dict[tuple[object, str], list[_Gather]] = {}
        for i, layer in enumerate(decoder.spec.layers):
            stacks = {}
            for (part, name), axes in _leaves(layer).items():
                source = plan["layers", str(i), part, name]
                key = getattr(layer, part), name
                if key not in known:
                    known[key] = _gathers(source, axes)
                leaf = f"{part}.{name}"
                for n, (tensor, gather) in enumerate(zip(source.names, known[key], strict=True)):
                    place = Place(i, leaf, n, gather)
                    places.setdefault(tensor.removesuffix(".weight"), []).append(place)
                stacks[leaf] = _stack_shapes(decoder, known[key], axes, num_slots, rank, dtype)
            shapes.append(stacks)
        if not places:
            raise ValueError(
                "enable_lora=True is not supported for this model: none of its layers has attention or an MLP that "
                "adapters can change."
            )
        return cls(places, tuple(shapes))

    def zeros(self) -> AdapterStacks:
        """Stacks without any adapter, made where they live."""

        def zeros() -> AdapterStacks:
            return jax.tree.map(lambda array: jnp.zeros(array.shape, array.dtype), self.shapes)

        shardings = jax.tree.map(lambda array: array.sharding, self.shapes)
        return jax.jit(zeros, out_shardings=shardings)()


def _leaves(layer: LayerSpec) -> dict[tuple[str, str], _LeafAxes]:
    names: dict[tuple[str, str], _LeafAxes] = {}
    if isinstance(layer.attention, AttentionSpec):
        gate = ("gate",) if layer.attention.gated else ()
        names |= {("attention", name): _ATTENTION[name] for name in ("qkv", "o", *gate)}
    if isinstance(layer.mlp, GatedMlpSpec):
        names |= {("mlp", name): _MLP[name] for name in ("gate_up", "down")}
    elif isinstance(layer.mlp, PlainMlpSpec):
        names |= {("mlp", name): _MLP[name] for name in ("up", "down")}
    return names


def _gathers(source: LeafSource, axes: _LeafAxes) -> list[_Gather]:
    """Of each of a leaf's sources; found by assembling row and column numbers in place of weights."""
    gathers = [_gather(source, n, len(axes.out)) for n in range(len(source.names))]
    if len(gathers) == 1:
        return gathers
    others = [i for i in range(len(axes.out)) if i != axes.joined]
    starts = [int(np.argmax((g.rows >= 0).any(axis=tuple(others)))) for g in gathers]
    stops = [*starts[1:], None]
    return [
        replace(g, rows=np.take(g.rows, range(g.rows.shape[axes.joined])[start:stop], axes.joined))
        for g, start, stop in zip(gathers, starts, stops, strict=True)
    ]


def _gather(source: LeafSource, index: int, num_out_axes: int) -> _Gather:
    shape = source.shapes[index]
    numbers = [_assembled_numbers(source, index, axis) for axis in (0, 1)]
    leaf = numbers[0].shape
    first, second = (x.reshape(prod(leaf[:num_out_axes]), -1) for x in numbers)
    # One place that isn't padding is enough: its row has all columns, its column all rows.
    row = next(i for i, numbers_i in enumerate(first) if numbers_i.any())
    column = int(np.argmax(first[row] > 0))
    # Some checkpoints store their matrices [in, out].
    if transposed := len(np.unique(first[row][first[row] > 0])) > 1:
        first, second = second, first
    return _Gather(
        shape[::-1] if transposed else shape,
        first[:, column].reshape(leaf[:num_out_axes]) - 1,
        second[row].reshape(leaf[num_out_axes:]) - 1,
    )


def _assembled_numbers(source: LeafSource, index: int, axis: int) -> np.ndarray:
    """The leaf, of a source whose elements are their numbers along `axis`, from 1 on, and others that are zeros."""
    tensors = [np.broadcast_to(np.int32(0), shape) for shape in source.shapes]
    shape = source.shapes[index]
    numbers = np.arange(1, shape[axis] + 1, dtype=np.int32)
    tensors[index] = np.broadcast_to(np.expand_dims(numbers, 1 - axis), shape)
    return source.assemble(tensors)


def _stack_shapes(
    decoder: FunctionalDecoder,
    gathers: list[_Gather],
    axes: _LeafAxes,
    num_slots: int,
    rank: int,
    dtype: jnp.dtype,
) -> LowRankStack:
    def array(shape: tuple[int, ...], of_shape: LogicalAxes) -> jax.ShapeDtypeStruct:
        sharding = named_sharding(decoder.mesh, of_shape)
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    columns = gathers[0].columns
    return LowRankStack(
        a=array((len(gathers), num_slots, rank, *columns.shape), (None, None, None, *axes.into)),
        b=tuple(
            array((num_slots, rank, *gather.rows.shape), (None, None, *axes.out))
            for gather in gathers
        ),
        axis=axes.joined,
    )
