"""Which family a checkpoint belongs to."""

from __future__ import annotations

from dataclasses import dataclass

from jaxinfer.models.cache_groups import model_groups
from jaxinfer.models.families import gemma3, llama, mistral, phi3, qwen2, qwen3
from jaxinfer.models.family import Config, Family
from jaxinfer.models.sharded_dims import ShardedDims
from jaxinfer.models.spec import DecoderSpec
from jaxinfer.weights.plan import LoadPlan

_FAMILIES: dict[str, Family] = {
    architecture: module.FAMILY
    for module in (llama, mistral, qwen2, qwen3, gemma3, phi3)
    for architecture in module.FAMILY.architectures
}


@dataclass(frozen=True)
class ModelDescription:
    """A checkpoint's model, as its config describes it."""

    spec: DecoderSpec
    checkpoint_dtype: str
    ignored_tensors: tuple[str, ...]
    """Regular expressions (full match) of tensors that checkpoints may hold and the decoder has no use for."""
    _family: Family
    _config: Config

    @property
    def vocab_size(self) -> int:
        return self.spec.vocab_size

    @property
    def max_position_embeddings(self) -> int:
        return self.spec.max_position_embeddings

    def cache_windows(self, max_model_len: int) -> tuple[int | None, ...]:
        """How far the groups of layers that take their pages together look back, in requests of at most so many tokens."""
        return model_groups(self.spec, max_model_len).windows

    def checkpoint_plan(self, dims: ShardedDims) -> LoadPlan:
        """How each leaf is made from the checkpoint's tensors."""
        return self._family.checkpoint_plan(self._config, self.spec, dims)


def describe_model(config: Config, max_model_len: int | None = None) -> ModelDescription:
    """Read a Hugging Face config. `max_model_len`, the longest request to be served (default: the longest that the
    model can take), decides which frequencies a longrope model gets.

    Raises `ValueError` for an architecture, or a feature of it, that is not supported.
    """
    architectures = config.get("architectures") or []
    family = next((_FAMILIES[a] for a in architectures if a in _FAMILIES), None)
    if family is None:
        named = ", ".join(architectures) or f"(none; model_type {config.get('model_type')!r})"
        raise ValueError(
            f"architecture {named} is not supported; supported: {', '.join(sorted(_FAMILIES))}."
        )
    inner = config.get("text_config", {})
    dtypes = [c.get(key) for c in (config, inner) for key in ("dtype", "torch_dtype")]
    spec = family.spec_from_config(config, max_model_len)
    return ModelDescription(
        spec=spec,
        checkpoint_dtype=next((d for d in dtypes if d), "float32"),
        ignored_tensors=family.ignored_tensors(spec),
        _family=family,
        _config=config,
    )
