"""From checkpoints to a running executor."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import jax
import jax.numpy as jnp

from jaxinfer.config import EngineConfig
from jaxinfer.executor.adapters import DeviceAdapters, MakeAdapters
from jaxinfer.executor.executor import MeshExecutor
from jaxinfer.executor.load_decoder import load_decoder, with_stored_leaves
from jaxinfer.executor.pooling_programs import ClassHead
from jaxinfer.executor.program_cache import ProgramCache
from jaxinfer.executor.speculative.load import make_drafter
from jaxinfer.logits_processors import LogitsProcessor
from jaxinfer.models.functional import FunctionalDecoder
from jaxinfer.models.registry import ModelDescription
from jaxinfer.parallel.mesh import make_mesh, replicated
from jaxinfer.weights.dummy import dummy_leaves
from jaxinfer.weights.loader import load_leaves
from jaxinfer.weights.plan import leaf_plan
from jaxinfer.weights.reader import CheckpointReader


def build_executor(
    config: EngineConfig,
    model: ModelDescription,
    reader: CheckpointReader,
    processors: Mapping[str, LogitsProcessor] | None = None,
    draft_reader: CheckpointReader | None = None,
) -> MeshExecutor:
    """Load `model` from `reader`, and where one is configured the drafter from `draft_reader`, onto this process's
    devices; `load_format` "dummy" makes weights up.

    Raises `CheckpointError` for a checkpoint that doesn't hold what the model needs, and `ValueError` for `processors`
    that aren't functions of logits, or a drafter that doesn't fit the model.
    """
    load = partial(load_decoder, config, model, reader)
    drafter = None if draft_reader is None else partial(make_drafter, config, draft_reader)
    store = partial(with_stored_leaves, config, model, reader)
    return MeshExecutor(
        config,
        model.spec,
        load,
        processors,
        drafter,
        _make_adapters(config, model),
        store,
        _class_head(config, model, reader),
    )


def _class_head(
    config: EngineConfig, model: ModelDescription, reader: CheckpointReader
) -> ClassHead:
    """Empty where the model has none."""
    if config.pooler is None or not config.pooler.labels:
        return ()
    where = replicated(make_mesh(config.parallel.tensor_parallel_size))
    dtype, num_classes = jnp.dtype(config.model.dtype), len(config.pooler.labels)
    shapes = {("score", "weight"): (num_classes, model.spec.embed_dim)}
    if "score.bias" in (() if config.load.load_format == "dummy" else reader.names()):
        shapes["score", "bias"] = (num_classes,)
    leaves = {
        path: jax.ShapeDtypeStruct(shape, dtype, sharding=where) for path, shape in shapes.items()
    }
    if config.load.load_format == "dummy":
        return tuple(dummy_leaves(leaves, config.model.seed).values())
    return tuple(load_leaves(reader, leaf_plan(shapes), leaves, ignored=(".*",)).values())


def _make_adapters(config: EngineConfig, model: ModelDescription) -> MakeAdapters | None:
    if config.lora is None:
        return None
    lora = config.lora

    def make(decoder: FunctionalDecoder, cache: ProgramCache) -> DeviceAdapters:
        return DeviceAdapters(lora, decoder, model.checkpoint_plan(decoder.dims), cache)

    return make
