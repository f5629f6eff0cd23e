"""From checkpoints to a running executor."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from jaxinfer.config import EngineConfig
from jaxinfer.executor.adapters import DeviceAdapters, MakeAdapters
from jaxinfer.executor.executor import MeshExecutor
from jaxinfer.executor.load_decoder import load_decoder, with_stored_leaves
from jaxinfer.executor.program_cache import ProgramCache
from jaxinfer.executor.speculative.load import make_drafter
from jaxinfer.logits_processors import LogitsProcessor
from jaxinfer.models.functional import FunctionalDecoder
from jaxinfer.models.registry import ModelDescription
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
    adapters = _make_adapters(config, model)
    return MeshExecutor(config, model.spec, load, processors, drafter, adapters, store)


def _make_adapters(config: EngineConfig, model: ModelDescription) -> MakeAdapters | None:
    if config.lora is None:
        return None
    lora = config.lora

    def make(decoder: FunctionalDecoder, cache: ProgramCache) -> DeviceAdapters:
        return DeviceAdapters(lora, decoder, model.checkpoint_plan(decoder.dims), cache)

    return make
