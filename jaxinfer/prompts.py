"""What people pass as prompts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from numbers import Integral

from jaxinfer.frontend.processor import Prompt


def prompt_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """A single prompt becomes a list of one; a list of integers is one prompt."""
    if isinstance(prompts, str | dict):
        return [prompts]
    if not isinstance(prompts, Iterable):
        raise ValueError(f"prompts must be a prompt or a list of prompts, got {prompts!r}.")
    prompts = list(prompts)
    return [prompts] if prompts and isinstance(prompts[0], Integral) else prompts
