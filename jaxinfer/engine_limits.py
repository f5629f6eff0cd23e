"""What a model allows, as far as an engine's configuration asks."""

from __future__ import annotations

from typing import Protocol


class ModelLimits(Protocol):
    """What the flat arguments need to know of the model."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def max_position_embeddings(self) -> int: ...
    @property
    def has_attention(self) -> bool: ...
    @property
    def has_states(self) -> bool: ...
    @property
    def checkpoint_dtype(self) -> str: ...

    def cache_windows(self, max_model_len: int) -> tuple[int | None, ...]:
        """See `CacheConfig.windows`."""
        ...
