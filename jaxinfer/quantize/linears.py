"""Which of a checkpoint's tensors are the matrices to be quantized, and where scales of their inputs can be hidden."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Literal

import numpy as np

from jaxinfer.models.registry import ModelDescription
from jaxinfer.models.spec import AttentionSpec, DecoderSpec, GatedMlpSpec, NormSpec
from jaxinfer.weights.plan import LeafPath, LeafSource, LoadPlan
from jaxinfer.weights.reader import CheckpointReader

_MATRICES = {
    ("attention", "qkv"),
    ("attention", "o"),
    ("mlp", "gate_up"),
    ("mlp", "up"),
    ("mlp", "down"),
    ("mlp", "shared", "gate_up"),
    ("mlp", "shared", "down"),
}
"""A layer's leaves that are made of such matrices. Routers and the gates of shared experts are small and stay as they are."""

Input = Literal["attention", "attended", "mlp", "hidden"]
"""What a layer's matrices get: the normed stream (q, k and v; gate and up), or what the last projection of attention and
MLP takes."""


@dataclass(frozen=True, slots=True)
class RowProducer:
    """The matrix that makes an input: row `rows[s]` of `tensor` makes channel s."""

    tensor: str
    rows: np.ndarray
    bias: str | None


@dataclass(frozen=True, slots=True)
class NormProducer:
    """The norm that makes an input: stored weights and their offset, and its bias."""

    tensor: str
    offset: float
    bias: str | None


@dataclass(frozen=True, slots=True)
class Fold:
    """Matrices with one input, whose columns may be scaled where what makes the input can be divided by the same."""

    input: Input
    consumers: tuple[str, ...]
    producer: RowProducer | NormProducer | None
    channels: np.ndarray
    """The channel of each column: those of one channel have the same scale."""


def find_matrices(
    description: ModelDescription, plan: LoadPlan, reader: CheckpointReader
) -> dict[str, tuple[int, int]]:
    """Names ("….weight") and shapes [out, in] of the matrices to be quantized.

    Raises `ValueError`, which names what stands in the way, for models with layers that are no attention and MLP.
    """
    for layer in description.spec.layers:
        if layer.state is not None:
            raise ValueError("model has layers with states, which can't be quantized.")
        if layer.attention is not None and not isinstance(layer.attention, AttentionSpec):
            raise ValueError("model has latent attention, which can't be quantized.")
    if description.transposed:
        raise ValueError("model stores its matrices [in, out], which can't be quantized.")
    found = {}
    for path, source in plan.items():
        if path[0] != "layers" or path[2:] not in _MATRICES:
            continue
        for name, shape in _stored(source, reader.names()):
            if len(shape) != 2 or not name.endswith(".weight"):
                raise ValueError(
                    f"model has experts in one tensor ({name} of shape {shape}), which can't be quantized."
                )
            found[name] = shape
    return found


def _stored(source: LeafSource, names: Collection[str]) -> list[tuple[str, tuple[int, ...]]]:
    """The tensors that the checkpoint has of a source."""
    while source.otherwise is not None and not all(name in names for name in source.names):
        source = source.otherwise
    return list(zip(source.names, source.shapes, strict=True))


def why_not_searched(spec: DecoderSpec) -> str | None:
    """What a search of scales doesn't know about a model; None where it can be done."""
    for layer in spec.layers:
        if not isinstance(layer.attention, AttentionSpec):
            return "layers without attention"
        if not isinstance(layer.mlp, GatedMlpSpec):
            return "layers without a gated MLP"
        if layer.norms not in ("pre", "both"):
            return f'norms placed "{layer.norms}"'
    if spec.positions is not None or spec.embed_norm:
        return "positions or a norm on its embedding"
    return None


def find_folds(spec: DecoderSpec, plan: LoadPlan, index: int) -> list[Fold]:
    """Those of layer `index` of a model that can be searched."""
    layer = spec.layers[index]
    path = ("layers", str(index))
    qkv, o = plan[(*path, "attention", "qkv")], plan[(*path, "attention", "o")]
    gate_up, down = plan[(*path, "mlp", "gate_up")], plan[(*path, "mlp", "down")]
    columns = [np.arange(source.shapes[0][1]) for source in (qkv, o, gate_up, down)]
    attention, norms = layer.attention, [None, None]
    if spec.norm.has_weight:
        norms = [_norm(spec.norm, plan, (*path, name)) for name in ("attention_norm", "mlp_norm")]
    values = None
    # What is done to values between the projections has to be linear in each channel.
    if attention.qkv_clip is None and not attention.gated:
        K, H = attention.num_kv_heads, attention.head_dim
        heads = np.arange(K * H).reshape(K, 1, H)
        columns[1] = np.broadcast_to(heads, (K, attention.num_heads // K, H)).reshape(-1)
        bias = plan.get((*path, "attention", "qkv_bias"))
        values = _rows(qkv, bias, lambda leaf: leaf[:, -1])
    up = _rows(gate_up, plan.get((*path, "mlp", "gate_up_bias")), lambda leaf: leaf[1])
    return [
        Fold("attention", qkv.names, norms[0], columns[0]),
        Fold("attended", o.names, values, columns[1]),
        Fold("mlp", gate_up.names, norms[1], columns[2]),
        Fold("hidden", down.names, up, columns[3]),
    ]


def _norm(norm: NormSpec, plan: LoadPlan, path: LeafPath) -> NormProducer:
    bias = plan[(*path[:-1], f"{path[-1]}_bias")].names[0] if norm.has_bias else None
    return NormProducer(plan[path].names[0], norm.weight_offset, bias)


def _rows(
    source: LeafSource, bias: LeafSource | None, part: Callable[[np.ndarray], np.ndarray]
) -> RowProducer:
    """The rows of the tensor that a part of a leaf comes from, in the leaf's order."""
    sizes = [shape[0] for shape in source.shapes]
    starts = np.cumsum([0, *sizes], dtype=np.int32)
    numbers = [
        np.broadcast_to(np.arange(start, start + shape[0], dtype=np.int32)[:, None], shape)
        for start, shape in zip(starts, source.shapes, strict=False)
    ]
    rows = part(source.assemble(numbers))[..., 0].reshape(-1)
    (which,) = set(np.searchsorted(starts, rows, side="right") - 1)
    return RowProducer(source.names[which], rows - starts[which], bias and bias.names[which])
