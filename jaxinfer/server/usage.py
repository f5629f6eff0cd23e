"""How many tokens a request used."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from jaxinfer.outputs import RequestOutput


@dataclass(slots=True)
class Usage:
    """Counts over all prompts of an HTTP request, as outputs of either kind, FINAL_ONLY or DELTA, come."""

    num_prompt: int
    num_completion: int = 0
    _cached: dict[int, int] = field(default_factory=dict)

    def add(self, index: int, output: RequestOutput) -> None:
        """`index` of the prompt."""
        self._cached[index] = output.num_cached_tokens
        self.num_completion += sum(len(completion.token_ids) for completion in output.outputs)

    def body(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.num_prompt,
            "completion_tokens": self.num_completion,
            "total_tokens": self.num_prompt + self.num_completion,
            "prompt_tokens_details": {"cached_tokens": sum(self._cached.values())},
        }
