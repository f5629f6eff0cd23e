"""Engine cores over a fake device, run to their end; and the oracle: the same tokens, one request at a time."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice

import numpy as np

from jaxinfer.engine.core import EngineCore
from jaxinfer.engine.grammars import GrammarBackend
from jaxinfer.engine.messages import EngineCoreOutputs, EngineCoreRequest, FinishReason
from jaxinfer.engine.plan import (
    Int32,
    StepResult,
)
from jaxinfer.engine.scheduled_step import ScheduledStep
from tests.engine.fake_executor import FakeExecutor
from tests.engine.fake_requests import MAX_MODEL_LEN, VOCAB, NextToken, hashed_token, make_config


class Guesses:
    """A source of drafts that knows what the fake device samples, and errs now and then: the guess at a place is wrong
    for one context in `wrong` (1: always, 0: never)."""

    def __init__(self, core: EngineCore, wrong: int, next_token: NextToken) -> None:
        self._table = core.scheduler.table
        self._wrong = wrong
        self._next_token = next_token

    def drafts(self, row: int, limit: int) -> Int32:
        context = self._table.token_ids(row, 0, int(self._table.num_tokens[row])).tolist()
        guesses = []
        for _ in range(limit):
            token = self._next_token(context)
            if self._wrong and zlib.crc32(bytes(context)) % self._wrong == 0:
                token = (token + 1) % VOCAB
            guesses.append(token)
            context.append(token)
        return np.array(guesses, np.int32)

    def store(self, step: ScheduledStep, result: StepResult) -> None:
        pass

    def clear(self) -> None:
        pass


def make_core(
    num_blocks: int = 64,
    next_token: NextToken = hashed_token,
    grammars: GrammarBackend | None = None,
    wrong_guesses: int | None = None,
    **config: object,
) -> tuple[EngineCore, FakeExecutor]:
    """`wrong_guesses`: see `Guesses`; drafts come from these where the engine speculates."""
    resolved = make_config(**config)  # type: ignore[arg-type]
    executor = FakeExecutor(resolved, num_blocks, next_token)
    core = EngineCore(resolved, executor, grammars)
    if core.scheduler.speculation is not None and wrong_guesses is not None:
        core.scheduler.speculation.source = Guesses(core, wrong_guesses, next_token)
    return core, executor


@dataclass
class Collected:
    """What all outputs together said of each request."""

    tokens: dict[str, list[int]] = field(default_factory=dict)
    ends: dict[str, tuple[FinishReason, int | str | None]] = field(default_factory=dict)
    first_scheduled: list[str] = field(default_factory=list)
    outputs: list[EngineCoreOutputs] = field(default_factory=list)

    def add(self, outputs: EngineCoreOutputs) -> None:
        self.outputs.append(outputs)
        self.first_scheduled += [times.request_id for times in outputs.first_scheduled]
        counts = outputs.num_tokens or [1] * len(outputs.request_ids)
        tokens = iter(outputs.token_ids)
        for request_id, count in zip(outputs.request_ids, counts, strict=True):
            assert request_id not in self.ends, "a token after the end"
            self.tokens.setdefault(request_id, []).extend(islice(tokens, count))
        assert next(tokens, None) is None
        for finished in outputs.finished:
            assert finished.request_id not in self.ends, "two ends"
            self.ends[finished.request_id] = (finished.reason, finished.stop_reason)


def run(
    core: EngineCore, requests: Sequence[EngineCoreRequest] = (), max_steps: int = 1000
) -> Collected:
    """Add the requests and step until nothing is left."""
    collected = Collected()
    for request in requests:
        core.add_request(request)
    for _ in range(max_steps):
        if not core.has_unfinished():
            return collected
        collected.add(core.step())
    raise AssertionError(f"still unfinished after {max_steps} steps")


def alone(
    request: EngineCoreRequest,
    next_token: NextToken = hashed_token,
    max_model_len: int = MAX_MODEL_LEN,
) -> tuple[list[int], tuple[FinishReason, int | str | None]]:
    """The oracle: tokens and end of a request that has the machine to itself, written as naively as can be."""
    params = request.sampling_params
    prompt, output = request.prompt_token_ids, []
    stops = [*request.eos_token_ids, *(params.stop_token_ids or [])]
    while True:
        allowed = set(
            range(VOCAB) if params.allowed_token_ids is None else params.allowed_token_ids
        )
        if len(output) < params.min_tokens:
            allowed -= set(stops)
        for word in params.bad_words_token_ids or []:
            if " ".join(map(str, ["", *output])).endswith(" ".join(map(str, ["", *word[:-1]]))):
                allowed.discard(word[-1])
        if not allowed:
            return output, (FinishReason.ERROR, None)
        token = next_token([*prompt, *output])
        while token not in allowed:
            token = (token + 1) % VOCAB
        output.append(token)
        if len(output) >= params.min_tokens:
            if token in request.eos_token_ids:
                return output, (FinishReason.STOP, None)
            if token in stops:
                return output, (FinishReason.STOP, token)
        if len(prompt) + len(output) == max_model_len or len(output) == params.max_tokens:
            return output, (FinishReason.LENGTH, None)
