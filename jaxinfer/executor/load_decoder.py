"""A decoder's leaves: weights from a checkpoint or made up, and the scales of an 8-bit KV cache."""

from __future__ import annotations

import jax
import numpy as np

from jaxinfer.config import EngineConfig
from jaxinfer.executor.kv_scales import SCALE_TENSORS, make_scales, scale_paths
from jaxinfer.models.functional import FunctionalDecoder
from jaxinfer.models.registry import ModelDescription
from jaxinfer.models.stored_layouts import stored_layouts
from jaxinfer.models.stored_weight import pack_part
from jaxinfer.weights.dummy import dummy_leaves
from jaxinfer.weights.loader import StoredLeaves, load_leaves
from jaxinfer.weights.quantization.reader import (
    QuantizedSource,
    check_quantization,
    quantization_of,
)
from jaxinfer.weights.reader import CheckpointReader


def load_decoder(
    config: EngineConfig,
    model: ModelDescription,
    reader: CheckpointReader,
    decoder: FunctionalDecoder,
) -> list[jax.Array]:
    """The leaves in the decoder's order; `load_format` "dummy" makes weights up.

    Raises `CheckpointError` for a checkpoint that doesn't hold what the model needs.
    """
    scales = set(scale_paths(decoder))
    stored = StoredLeaves(decoder.layouts, np.dtype(decoder.dtype), pack_part)
    weights = {path: leaf for path, leaf in decoder.leaves.items() if path not in scales}
    if config.load.load_format == "dummy":
        leaves = dummy_leaves(weights, config.model.seed)
    else:
        leaves = load_leaves(
            reader,
            model.checkpoint_plan(decoder.dims, reader.names()),
            weights,
            ignored=(*model.ignored_tensors, SCALE_TENSORS),
            stored=stored,
        )
    leaves |= make_scales(decoder, leaves, reader)
    return [leaves[path] for path in decoder.leaves]


def with_stored_leaves(
    config: EngineConfig,
    model: ModelDescription,
    reader: CheckpointReader,
    decoder: FunctionalDecoder,
) -> FunctionalDecoder:
    """The decoder with those leaves kept quantized that the checkpoint has quantized, unless the config says otherwise.

    Raises `ValueError` for a checkpoint that isn't quantized as the config says.
    """
    load = config.load
    check_quantization(load.quantization, quantization_of(reader))
    if load.load_format == "dummy" or not isinstance(reader, QuantizedSource):
        return decoder
    dequantize = load.dequantize
    if dequantize is None:
        dequantize = config.device == "cpu" and reader.quantization == "gguf"
    if dequantize:
        return decoder
    plan = model.checkpoint_plan(decoder.dims, reader.names())
    return decoder.with_layouts(stored_layouts(reader, plan, decoder))
