"""From a drafter's checkpoint to a drafter of the configured method."""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial

import jax

from jaxinfer.config import EngineConfig
from jaxinfer.executor.load_decoder import load_decoder, with_stored_leaves
from jaxinfer.executor.speculative.draft_model import DraftModel
from jaxinfer.executor.speculative.eagle3 import Eagle3Drafter
from jaxinfer.executor.speculative.medusa import MedusaDrafter
from jaxinfer.executor.speculative.model_drafter import DrafterSetting, DraftModule, ModelDrafter
from jaxinfer.models.drafters import eagle3_checkpoint
from jaxinfer.models.drafters import medusa as medusa_heads
from jaxinfer.models.drafters.eagle3 import FunctionalEagle3
from jaxinfer.models.drafters.medusa import FunctionalMedusa
from jaxinfer.models.functional import FunctionalDecoder
from jaxinfer.models.registry import describe_model
from jaxinfer.weights.dummy import dummy_leaves
from jaxinfer.weights.loader import check_plan, load_leaves
from jaxinfer.weights.plan import LoadPlan
from jaxinfer.weights.reader import CheckpointReader


def make_drafter(
    config: EngineConfig,
    reader: CheckpointReader,
    target: FunctionalDecoder,
    setting: DrafterSetting,
) -> ModelDrafter:
    """The drafter of `config.speculative.method`, whose checkpoint is `reader`'s.

    Raises `ValueError` for a checkpoint of another vocabulary or hidden size than the target's, or one that lacks
    tensors.
    """
    assert config.speculative is not None
    make = {"draft_model": _draft_model, "eagle3": _eagle3, "medusa": _medusa}
    return make[config.speculative.method](config, reader, target, setting)


def _draft_model(
    config: EngineConfig,
    reader: CheckpointReader,
    target: FunctionalDecoder,
    setting: DrafterSetting,
) -> ModelDrafter:
    description = describe_model(reader.config(), config.model.max_model_len)
    if description.has_states:
        raise ValueError(
            "The draft model's layers keep states, which can't go back to an earlier token."
        )
    if description.vocab_size != target.spec.vocab_size:
        raise ValueError(
            f"The draft model must have the target's vocabulary of {target.spec.vocab_size} tokens, it has "
            f"{description.vocab_size}."
        )
    decoder = FunctionalDecoder.create(description.spec, target.mesh, target.dtype, target.kv_dtype)
    decoder = with_stored_leaves(config, description, reader, decoder)
    load = partial(load_decoder, config, description, reader, decoder)
    return DraftModel(setting, decoder, load, description.max_position_embeddings)


def _eagle3(
    config: EngineConfig,
    reader: CheckpointReader,
    target: FunctionalDecoder,
    setting: DrafterSetting,
) -> ModelDrafter:
    names = _tensor_names(config, reader)
    spec = eagle3_checkpoint.eagle3_spec(reader.config(), target.spec, names)
    module = FunctionalEagle3.create(spec, target.mesh, target.dtype)
    plan = eagle3_checkpoint.eagle3_plan(module, names)
    ignored = eagle3_checkpoint.IGNORED_TENSORS
    return Eagle3Drafter(setting, module, _loader(config, reader, module, plan, ignored))


def _medusa(
    config: EngineConfig,
    reader: CheckpointReader,
    target: FunctionalDecoder,
    setting: DrafterSetting,
) -> ModelDrafter:
    names = _tensor_names(config, reader)
    spec = medusa_heads.medusa_spec(reader.config(), target.spec, setting.num_drafts, names)
    module = FunctionalMedusa.create(spec, target.mesh, target.dtype)
    plan = medusa_heads.medusa_plan(module, names)
    ignored = medusa_heads.IGNORED_TENSORS
    return MedusaDrafter(setting, module, _loader(config, reader, module, plan, ignored))


def _tensor_names(config: EngineConfig, reader: CheckpointReader) -> Collection[str]:
    return () if config.load.load_format == "dummy" else reader.names()


def _loader(
    config: EngineConfig,
    reader: CheckpointReader,
    module: DraftModule,
    plan: LoadPlan,
    ignored: tuple[str, ...],
) -> Callable[[], list[jax.Array]]:
    """What loads the leaves. A checkpoint that doesn't fit is found out at once."""
    abstract = dict(module.leaves)
    if config.load.load_format == "dummy":
        return lambda: list(dummy_leaves(abstract, config.model.seed).values())
    check_plan(reader, plan, abstract, ignored)

    def load() -> list[jax.Array]:
        leaves = load_leaves(reader, plan, abstract, ignored=ignored)
        return [leaves[path] for path in abstract]

    return load
