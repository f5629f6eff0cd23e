"""From a checkpoint to a running executor."""

from __future__ import annotations

import jax

from jaxinfer.config import EngineConfig
from jaxinfer.executor.executor import MeshExecutor
from jaxinfer.models.functional import FunctionalDecoder
from jaxinfer.models.registry import ModelDescription
from jaxinfer.weights.dummy import dummy_leaves
from jaxinfer.weights.loader import load_leaves
from jaxinfer.weights.reader import CheckpointReader


def build_executor(
    config: EngineConfig, model: ModelDescription, reader: CheckpointReader
) -> MeshExecutor:
    """Load `model` from `reader` onto this process's devices; `load_format` "dummy" makes its weights up.

    Raises `CheckpointError` for a checkpoint that doesn't hold what the model needs.
    """

    def load(decoder: FunctionalDecoder) -> list[jax.Array]:
        if config.load.load_format == "dummy":
            leaves = dummy_leaves(decoder.leaves, config.model.seed)
        else:
            leaves = load_leaves(
                reader,
                model.checkpoint_plan(decoder.dims),
                decoder.leaves,
                ignored=model.ignored_tensors,
            )
        return [leaves[path] for path in decoder.leaves]

    return MeshExecutor(config, model.spec, load)
