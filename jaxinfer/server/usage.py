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
    num_reasoning: int | None = None
    """Of the completions' tokens, those of thoughts; None where nobody looks for them."""
    _cached: dict[int, int] = field(default_factory=dict)

    def add(self, index: int, output: RequestOutput) -> None:
        """`index` of the prompt."""
        self._cached[index] = output.num_cached_tokens
        self.num_completion += sum(len(completion.token_ids) for completion in output.outputs)

    @property
    def num_cached(self) -> int:
        return sum(self._cached.values())

    def body(self) -> dict[str, Any]:
        details = {}
        if self.num_reasoning is not None:
            details["completion_tokens_details"] = {"reasoning_tokens": self.num_reasoning}
        return {
            "prompt_tokens": self.num_prompt,
            "completion_tokens": self.num_completion,
            "total_tokens": self.num_prompt + self.num_completion,
            "prompt_tokens_details": {"cached_tokens": self.num_cached},
            **details,
        }
