"""An encoder's checkpoint, as its config describes it."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from jaxinfer.models.encoders.families import ENCODERS, EncoderFamily, Purpose
from jaxinfer.models.encoders.spec import EncoderSpec
from jaxinfer.models.family import Config
from jaxinfer.weights.plan import LoadPlan


@dataclass(frozen=True, slots=True)
class EncoderDescription:
    """`max_position_embeddings` counts the tokens of a text."""

    spec: EncoderSpec
    purpose: Purpose
    checkpoint_dtype: str
    max_position_embeddings: int
    _family: EncoderFamily

    has_attention = False
    """With a KV cache."""
    has_states = False

    @property
    def vocab_size(self) -> int:
        return self.spec.vocab_size

    @property
    def ignored_tensors(self) -> tuple[str, ...]:
        return self._family.ignored(self.spec)

    def cache_windows(self, max_model_len: int) -> tuple[int | None, ...]:
        return (None,)

    def checkpoint_plan(self, tensors: Collection[str]) -> LoadPlan:
        return self._family.plan(self.spec, tensors)


def is_encoder(config: Config) -> bool:
    return any(a in ENCODERS for a in config.get("architectures") or [])


def describe_encoder(config: Config) -> EncoderDescription:
    """Raises `ValueError` for a feature that is not supported."""
    architecture = next(a for a in config["architectures"] if a in ENCODERS)
    family, purpose = ENCODERS[architecture]
    spec = family.spec(config, purpose)
    dtype = config.get("dtype") or config.get("torch_dtype") or "float32"
    return EncoderDescription(spec, purpose, dtype, spec.max_tokens, family)
