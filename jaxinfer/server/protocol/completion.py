"""`/v1/completions`."""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import model_validator

from jaxinfer.server.errors import BadRequest
from jaxinfer.server.protocol.common import GenerationRequest, Int

MAX_PROMPTS = 2048


class CompletionRequest(GenerationRequest):
    """`max_tokens` is 16 by default; 0 is allowed with `echo`, to score a prompt."""

    unsupported: ClassVar[dict[str, str]] = GenerationRequest.unsupported | {
        "suffix": "suffix is not supported: these models only continue text.",
    }

    prompt: str | list[Int] | list[list[Int]] | list[str]
    echo: bool = False
    logprobs: Int | None = None
    max_tokens: Int | None = None
    add_special_tokens: bool = True

    @model_validator(mode="after")
    def _check(self) -> CompletionRequest:
        if self.logprobs is not None and self.logprobs < 0:
            raise BadRequest(f"logprobs must be at least 0, got {self.logprobs}.", param="logprobs")
        if self.max_tokens is not None and self.max_tokens < (0 if self.echo else 1):
            raise BadRequest(
                f"max_tokens must be at least 1, got {self.max_tokens} (0 is for echo).",
                param="max_tokens",
            )
        if self.echo and self.stream and self.num_logprobs is not None:
            raise BadRequest("echo with logprobs can't be streamed.", param="echo")
        if not self.prompts:
            raise BadRequest("prompt must not be empty.", param="prompt")
        if len(self.prompts) > MAX_PROMPTS:
            raise BadRequest(f"prompt may hold at most {MAX_PROMPTS} prompts.", param="prompt")
        return self

    @property
    def num_logprobs(self) -> int | None:
        return len(self.logprob_token_ids) if self.logprob_token_ids else self.logprobs

    @property
    def prompts(self) -> list[Any]:
        """Each a string or a list of token ids."""
        prompt = self.prompt
        if isinstance(prompt, str) or (prompt and isinstance(prompt[0], int)):
            return [prompt]
        return list(prompt)
