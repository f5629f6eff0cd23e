"""Activation-aware weights of one layer (arXiv 2306.00978): scaled so that rounding hurts less where inputs are large."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np

from jaxinfer.quantize.compensation import round_compensated
from jaxinfer.quantize.grids import Int4Groups, int4_grids, on_grids
from jaxinfer.quantize.linears import Fold, Input, NormProducer, RowProducer
from jaxinfer.quantize.search import InputMoments, best_grids, find_scale

logger = logging.getLogger(__name__)

Tensors = dict[str, np.ndarray]


@dataclass(frozen=True, slots=True)
class ScaledLayer:
    """A layer that computes what it did, with other weights.

    Attributes:
        matrices: float32, to be rounded.
        others: norms and biases that changed, in their own dtypes.
        moments: of what the matrices get now.
    """

    matrices: Tensors
    others: Tensors
    moments: dict[Input, InputMoments]


def scaled_layer(
    read: Callable[[str], np.ndarray],
    folds: Sequence[Fold],
    moments: Mapping[Input, InputMoments],
    group_size: int,
) -> ScaledLayer:
    """With the scales that are found to be the best. `read` gives the checkpoint's tensors as they are."""
    matrices = {name: read(name).astype(np.float32) for fold in folds for name in fold.consumers}
    scales = {fold.input: _found(fold, matrices, moments, group_size) for fold in folds}
    others: Tensors = {}
    for fold in folds:
        # The norm is rounded to its dtype: what it was divided by thereby is the scale, exactly.
        if isinstance(fold.producer, NormProducer):
            others |= _divided_norm(read, fold.producer, scales[fold.input])
        elif isinstance(fold.producer, RowProducer):
            others |= _divided_rows(read, fold.producer, scales[fold.input], matrices)
    seen = {}
    for fold in folds:
        scale_i = scales[fold.input][fold.channels]
        for name in fold.consumers:
            matrices[name] *= scale_i
        seen[fold.input] = moments[fold.input].divided_by(jnp.asarray(scale_i))
    return ScaledLayer(matrices, others, seen)


def rounded_matrices(
    layer: ScaledLayer,
    folds: Sequence[Fold],
    group_size: int,
    scale_dtype: np.dtype,
    *,
    clip: bool,
    compensate: bool,
) -> dict[str, Int4Groups]:
    """`clip`: where grids end is searched; `compensate`: each column makes up for those before it."""
    rounded = {}
    for fold in folds:
        moments = layer.moments[fold.input]
        for name in fold.consumers:
            weight = jnp.asarray(layer.matrices[name])
            groups = weight.reshape(len(weight), -1, group_size)
            if clip:
                zeros, scales = best_grids(groups, moments.products, scale_dtype)
            else:
                zeros, scales = int4_grids(groups, scale_dtype)
            if compensate:
                rounded[name] = round_compensated(weight, moments, zeros, scales, group_size)
            else:
                rounded[name] = on_grids(groups, zeros, scales)
    return rounded


def _found(
    fold: Fold, tensors: Tensors, moments: Mapping[Input, InputMoments], group_size: int
) -> np.ndarray:
    """[S]"""
    if fold.producer is None:
        return np.ones(fold.channels.max() + 1, np.float32)
    weight = jnp.concatenate([tensors[name] for name in fold.consumers])
    found = find_scale(weight, moments[fold.input], fold.channels, group_size)
    logger.debug("%s: error %.3g, unscaled %.3g", fold.consumers[0], found.error, found.plain_error)
    return np.array(found.scale)


def _divided_norm(
    read: Callable[[str], np.ndarray], norm: NormProducer, scale: np.ndarray
) -> Tensors:
    """The norm, divided by `scale`, which is changed to what the rounded weights were really divided by."""
    weight = read(norm.tensor)
    factor = weight.astype(np.float32) + np.float32(norm.offset)
    divided = (factor / scale - np.float32(norm.offset)).astype(weight.dtype)
    rounded = divided.astype(np.float32) + np.float32(norm.offset)
    usable = (factor != 0) & (rounded != 0)
    scale[:] = np.where(usable, factor / np.where(usable, rounded, 1), 1)
    changed = {norm.tensor: np.where(usable, divided, weight)}
    if norm.bias is not None:
        bias = read(norm.bias)
        changed[norm.bias] = (bias.astype(np.float32) / scale).astype(bias.dtype)
    return changed


def _divided_rows(
    read: Callable[[str], np.ndarray], rows: RowProducer, scale: np.ndarray, tensors: Tensors
) -> Tensors:
    """Divides the rows in `tensors`; returns the bias, if there is one."""
    tensors[rows.tensor][rows.rows] /= scale[:, None]
    if rows.bias is None:
        return {}
    bias = read(rows.bias)
    divided = bias.astype(np.float32)
    divided[rows.rows] /= scale
    return {rows.bias: divided.astype(bias.dtype)}
