"""A decoder's leaves: weights from a checkpoint or made up, and the scales of an 8-bit KV cache."""

from __future__ import annotations

import jax

from jaxinfer.config import EngineConfig
from jaxinfer.executor.kv_scales import SCALE_TENSORS, make_scales, scale_paths
from jaxinfer.models.functional import FunctionalDecoder
from jaxinfer.models.registry import ModelDescription
from jaxinfer.weights.dummy import dummy_leaves
from jaxinfer.weights.loader import load_leaves
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
    weights = {path: leaf for path, leaf in decoder.leaves.items() if path not in scales}
    if config.load.load_format == "dummy":
        leaves = dummy_leaves(weights, config.model.seed)
    else:
        leaves = load_leaves(
            reader,
            model.checkpoint_plan(decoder.dims, reader.names()),
            weights,
            ignored=(*model.ignored_tensors, SCALE_TENSORS),
        )
    leaves |= make_scales(decoder, leaves, reader)
    return [leaves[path] for path in decoder.leaves]
