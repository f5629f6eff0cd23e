"""From a checkpoint to a running executor."""

from __future__ import annotations

from collections.abc import Mapping

import jax

from jaxinfer.config import EngineConfig
from jaxinfer.executor.executor import MeshExecutor
from jaxinfer.executor.kv_scales import SCALE_TENSORS, make_scales, scale_paths
from jaxinfer.logits_processors import LogitsProcessor
from jaxinfer.models.functional import FunctionalDecoder
from jaxinfer.models.registry import ModelDescription
from jaxinfer.weights.dummy import dummy_leaves
from jaxinfer.weights.loader import load_leaves
from jaxinfer.weights.reader import CheckpointReader


def build_executor(
    config: EngineConfig,
    model: ModelDescription,
    reader: CheckpointReader,
    processors: Mapping[str, LogitsProcessor] | None = None,
) -> MeshExecutor:
    """Load `model` from `reader` onto this process's devices; `load_format` "dummy" makes its weights up.

    Raises `CheckpointError` for a checkpoint that doesn't hold what the model needs, and `ValueError` for `processors`
    that aren't functions of logits.
    """

    def load(decoder: FunctionalDecoder) -> list[jax.Array]:
        scales = set(scale_paths(decoder))
        weights = {path: leaf for path, leaf in decoder.leaves.items() if path not in scales}
        if config.load.load_format == "dummy":
            leaves = dummy_leaves(weights, config.model.seed)
        else:
            leaves = load_leaves(
                reader,
                model.checkpoint_plan(decoder.dims),
                weights,
                ignored=(*model.ignored_tensors, SCALE_TENSORS),
            )
        leaves |= make_scales(decoder, leaves, reader)
        return [leaves[path] for path in decoder.leaves]

    return MeshExecutor(config, model.spec, load, processors)
