"""Beam search: the most likely outputs, kept `beam_width` at a time. vLLM's names and scores."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from jaxinfer.frontend.processor import PreparedRequest, TokensPrompt
from jaxinfer.outputs import PositionLogprobs, RequestOutput
from jaxinfer.sampling_params import SamplingParams, check_integer, check_real

MAX_BEAMS = 1024


class BeamSearchParams(msgspec.Struct, omit_defaults=True):
    """`ValueError` on construction for what is out of range.

    Args:
        beam_width: Beams that are kept, and outputs that are returned; the engine's `max_logprobs` must be at least
            twice this.
        max_tokens: Upper bound of the output.
        ignore_eos: Treat the model's end-of-sequence tokens as any other.
        temperature: Accepted because vLLM has it. Beams are compared by the model's own probabilities.
        length_penalty: A score is the sum of the logprobs over the number of tokens (prompt and output) to this power.
        include_stop_str_in_output: Whether the end-of-sequence token is part of the output.
    """

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0
    include_stop_str_in_output: bool = False

    def __post_init__(self) -> None:
        self.beam_width = check_integer("beam_width", self.beam_width, 1, MAX_BEAMS)
        self.max_tokens = check_integer("max_tokens", self.max_tokens, 1, 2**31 - 1)
        self.temperature = check_real("temperature", self.temperature, 0.0)
        self.length_penalty = check_real("length_penalty", self.length_penalty, -100.0, 100.0)


@dataclass(slots=True)
class BeamSearchSequence:
    """`tokens` are the prompt's and the output's, `logprobs` those of the output, `text` is of the output."""

    tokens: list[int]
    logprobs: list[PositionLogprobs]
    cum_logprob: float = 0.0
    text: str | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


@dataclass(slots=True)
class BeamSearchOutput:
    """The best sequences, best first."""

    sequences: list[BeamSearchSequence]


@dataclass(slots=True)
class BeamSearch:
    """The search from one prompt: `beams` go on, `completed` have met an end-of-sequence token. Sequences hold at most
    `max_len` tokens."""

    prompt_token_ids: list[int]
    params: BeamSearchParams
    eos_token_ids: Collection[int]
    max_len: int
    cache_salt: str | None = None
    beams: list[BeamSearchSequence] = field(init=False)
    completed: list[BeamSearchSequence] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.beams = [BeamSearchSequence(list(self.prompt_token_ids), [])]

    @property
    def prompts(self) -> list[TokensPrompt]:
        """What to generate one token for next, one for each of `beams`; none at the end."""
        if not self.beams or len(self.beams[0].tokens) >= self.max_len:
            return []
        salt: dict[str, Any] = {} if self.cache_salt is None else {"cache_salt": self.cache_salt}
        return [TokensPrompt(prompt_token_ids=beam.tokens, **salt) for beam in self.beams]

    @property
    def step_params(self) -> SamplingParams:
        """One token of a beam, with enough candidates that `beam_width` of all are left when each beam may end."""
        return SamplingParams(
            temperature=0.0,
            max_tokens=1,
            logprobs=2 * self.params.beam_width,
            ignore_eos=True,
            detokenize=False,
        )

    @classmethod
    def of(
        cls,
        prompt: PreparedRequest,
        params: BeamSearchParams,
        eos_token_ids: Collection[int],
        max_len: int,
    ) -> BeamSearch:
        if not isinstance(params, BeamSearchParams):
            raise ValueError(f"params must be BeamSearchParams, got {params!r}.")
        salt = prompt.core_requests[0].cache_salt
        return cls(prompt.prompt_token_ids, params, frozenset(eos_token_ids), max_len, salt)

    def advance(self, outputs: Sequence[RequestOutput]) -> None:
        """Take in the next token's logprobs, one output per beam."""
        going: list[BeamSearchSequence] = []
        for beam, output in zip(self.beams, outputs, strict=True):
            [logprobs] = output.outputs[0].logprobs or [{}]
            for token, scored in logprobs.items():
                ends = token in self.eos_token_ids and not self.params.ignore_eos
                keeps = not ends or self.params.include_stop_str_in_output
                new = BeamSearchSequence(
                    [*beam.tokens, token] if keeps else beam.tokens,
                    [*beam.logprobs, logprobs],
                    beam.cum_logprob + scored.logprob,
                    finish_reason="stop" if ends else None,
                )
                (self.completed if ends else going).append(new)
        going.sort(key=self.score, reverse=True)
        self.beams = going[: self.params.beam_width]

    def score(self, sequence: BeamSearchSequence) -> float:
        length = len(self.prompt_token_ids) + len(sequence.logprobs)
        length -= sequence.finish_reason == "stop"
        return sequence.cum_logprob / length**self.params.length_penalty

    def result(self, decode: Callable[[list[int]], str]) -> BeamSearchOutput:
        for beam in self.beams:
            beam.finish_reason = "length"
        best = sorted([*self.completed, *self.beams], key=self.score, reverse=True)
        best = best[: self.params.beam_width]
        for sequence in best:
            sequence.text = decode(sequence.tokens[len(self.prompt_token_ids) :])
        return BeamSearchOutput(best)
