"""Which family a checkpoint belongs to."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from pkgutil import iter_modules

from jaxinfer.models import families
from jaxinfer.models.cache_groups import model_groups
from jaxinfer.models.family import Config, Family
from jaxinfer.models.sharded_dims import ShardedDims
from jaxinfer.models.spec import DecoderSpec
from jaxinfer.weights.plan import LoadPlan

_MODULES = tuple(
    import_module(f"{families.__name__}.{module.name}")
    for module in iter_modules(families.__path__)
)
"""Every file of `families`, with its FAMILIES."""

ENTRY_POINTS = "jaxinfer.families"
"""The group of entry points by which installed packages bring families of their own."""

_FAMILIES: dict[str, Family] = {
    architecture: family
    for module in _MODULES
    for family in module.FAMILIES
    for architecture in family.architectures
}
_BY_MODEL_TYPE: dict[str, Family] = {
    model_type: family
    for module in _MODULES
    for family in module.FAMILIES
    for model_type in family.model_types
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

    @property
    def has_attention(self) -> bool:
        return bool(self.spec.attentions)

    @property
    def has_states(self) -> bool:
        return self.spec.has_states

    @property
    def architectures(self) -> list[str]:
        return self._config.get("architectures") or []

    @property
    def transposed(self) -> bool:
        """Whether the checkpoint stores the matrices of its layers [in, out]."""
        return self._family.tensor_names(self._config).transposed

    def cache_windows(self, max_model_len: int) -> tuple[int | None, ...]:
        """How far the groups of layers that take their pages together look back, in requests of at most so many tokens."""
        return model_groups(self.spec, max_model_len).windows

    def checkpoint_plan(self, dims: ShardedDims, tensors: Collection[str] = ()) -> LoadPlan:
        """How each leaf is made from the checkpoint's tensors. `tensors`: their names, where they are known: those of a
        model that was saved without its head lack the first part of what all others begin with."""
        plan = self._family.plan(self._config, self.spec, dims)
        prefix = plan["embed",].names[0].split(".")[0] + "."
        if not tensors or any(name.startswith(prefix) for name in tensors):
            return plan
        return {
            path: source.renamed(lambda name: name.removeprefix(prefix))
            for path, source in plan.items()
        }


def register(family: Family) -> None:
    """Serve checkpoints of the family's architectures by it, whatever served them before.

    This is for the running process. A server's engine core is another one: a package that makes its family an entry point
    of the group "jaxinfer.families" has it registered in each.
    """
    for architecture in family.architectures:
        _FAMILIES[architecture] = family


@cache
def _register_installed() -> None:
    for entry_point in entry_points(group=ENTRY_POINTS):
        register(entry_point.load())


def find_family(config: Config) -> Family | None:
    """The family that a Hugging Face config belongs to, None where none of its architectures is known."""
    architectures = config.get("architectures") or []
    by_type = _BY_MODEL_TYPE.get(config.get("model_type", ""))
    if by_type is not None:
        return by_type
    if not any(a in _FAMILIES for a in architectures):
        _register_installed()
    return next((_FAMILIES[a] for a in architectures if a in _FAMILIES), None)


def describe_model(config: Config, max_model_len: int | None = None) -> ModelDescription:
    """Read a Hugging Face config. `max_model_len`, the longest request to be served (default: the longest that the
    model can take), decides which frequencies a longrope model gets.

    Raises `ValueError` for an architecture, or a feature of it, that is not supported.
    """
    family = find_family(config)
    if family is None:
        architectures = config.get("architectures") or []
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
