"""What a request for vectors may ask for: vLLM's names."""

from __future__ import annotations

from typing import get_args

import msgspec

from jaxinfer.engine.messages import PoolingTask


class PoolingParams(msgspec.Struct):
    """Every field's None leaves it to the model.

    `truncate_prompt_tokens`: longer prompts are cut to so many tokens, -1 to the most that the model takes; None refuses
    them. `dimensions`: an embedding's first so many elements, of models that are made for it. `use_activation`: whether
    embeddings are normalised, and classes get their probabilities in place of logits. `task`: "embed", "classify", and
    for every token "token_embed" and "token_classify". `skip_reading_prefix_cache`: compute all of the prompt.

    Raises `ValueError` where a value can't be meant.
    """

    truncate_prompt_tokens: int | None = None
    dimensions: int | None = None
    use_activation: bool | None = None
    task: PoolingTask | None = None
    skip_reading_prefix_cache: bool = False

    def __post_init__(self) -> None:
        keep = self.truncate_prompt_tokens
        if keep is not None and (not _is_int(keep) or keep < -1 or keep == 0):
            raise ValueError(f"truncate_prompt_tokens must be -1 or at least 1, got {keep!r}.")
        if self.dimensions is not None and (not _is_int(self.dimensions) or self.dimensions < 1):
            raise ValueError(f"dimensions must be at least 1, got {self.dimensions!r}.")
        if self.use_activation is not None and not isinstance(self.use_activation, bool):
            raise ValueError(f"use_activation must be true or false, got {self.use_activation!r}.")
        tasks = get_args(PoolingTask.__value__)
        if self.task is not None and self.task not in tasks:
            raise ValueError(f"task must be one of {tasks}, got {self.task!r}.")


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
