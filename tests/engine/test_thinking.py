"""Thoughts before answers, over a fake device: bounded, and followed by a grammar that is a list of places."""

from __future__ import annotations

import json
from collections.abc import Sequence
from random import Random

import msgspec
import pytest

from jaxinfer.engine.messages import EngineCoreRequest, FinishReason, Thinking
from tests.engine.core_runs import make_core, run
from tests.engine.fake_requests import MAX_MODEL_LEN, VOCAB, hashed_token, make_request, speculative
from tests.engine.test_grammars import EOS, ListGrammars

START, END = 3, 4


def next_token(context: Sequence[int]) -> int:
    """Often one of the tokens that mean something."""
    token = hashed_token(context)
    return (START, END, EOS)[token % 3] if token % 7 == 0 else token


def allowed_after(request: EngineCoreRequest, output: list[int]) -> list[int]:
    """What may come next, from the output alone."""
    thinking, everything = request.thinking, list(range(VOCAB))
    places = None if request.grammar is None else json.loads(request.grammar)

    def answer(tokens: list[int]) -> list[int]:
        if places is None:
            return everything
        return places[len(tokens)] if len(tokens) < len(places) else [EOS]

    if thinking is None:
        return answer(output)
    thoughts = output
    if not thinking.has_begun:
        if not output:
            return sorted({START, *answer([])})
        if output[0] != START:
            return answer(output)
        thoughts = output[1:]
    if END in thoughts:
        return answer(thoughts[thoughts.index(END) + 1 :])
    if len(thoughts) == thinking.max_tokens:
        return [END]
    return [t for t in everything if places is None or t not in request.eos_token_ids]


def naive(request: EngineCoreRequest) -> tuple[list[int], FinishReason]:
    output: list[int] = []
    while True:
        allowed = allowed_after(request, output)
        token = next_token([*request.prompt_token_ids, *output])
        while token not in allowed:
            token = (token + 1) % VOCAB
        output.append(token)
        is_last = allowed == [EOS] and request.grammar is not None
        if is_last or token in request.eos_token_ids:
            return output, FinishReason.STOP
        if len(output) == request.sampling_params.max_tokens:
            return output, FinishReason.LENGTH


def random_requests(rng: Random, count: int) -> list[EngineCoreRequest]:
    requests = []
    for i in range(count):
        places = [rng.sample(range(10, VOCAB), rng.choice((1, 1, 1, 3))) for _ in range(4)]
        request = make_request(
            str(i),
            rng.randint(1, 8),
            eos=rng.choice(([EOS], [])),
            grammar=rng.choice((json.dumps(places), None)),
            max_tokens=MAX_MODEL_LEN - 9,
        )
        if rng.random() < 0.85:
            limit = rng.choice((None, 0, 1, 4, 9))
            request.thinking = Thinking(START, END, rng.random() < 0.6, limit)
        requests.append(request)
    return requests


@pytest.mark.parametrize("num_blocks", [60, 11])
@pytest.mark.parametrize("kind", ["overlap", "one by one", "drafts"])
def test_random_mixes_give_what_one_token_after_the_other_gives(kind: str, num_blocks: int):
    forced = 0
    for seed in range(25):
        core, executor = make_core(
            num_blocks,
            next_token,
            ListGrammars(),
            3 if kind == "drafts" else None,
            overlap=kind == "overlap",
            speculative=speculative() if kind == "drafts" else None,
        )
        requests = random_requests(Random(seed), 8)
        collected = run(core, requests)
        for request in requests:
            tokens, reason = naive(request)
            assert collected.tokens[request.request_id] == tokens
            assert collected.ends[request.request_id][0] is reason
        assert core.scheduler.kv.pool.num_free == num_blocks - 1
        forced += sum(len(plan.forced) for plan in executor.plans)
    assert forced or kind == "drafts"


def test_a_budget_needs_no_grammars():
    core, _ = make_core(next_token=lambda context: 20)
    request = make_request("a", 3, max_tokens=9)
    request.thinking = Thinking(START, END, True, 2)
    assert run(core, [request]).tokens["a"] == [20, 20, END, 20, 20, 20, 20, 20, 20]


def test_what_is_said_of_thoughts_crosses_to_another_process():
    request = make_request("a", 3)
    request.thinking = Thinking(START, END, False, 7)
    sent = msgspec.msgpack.encode(request)
    assert msgspec.msgpack.decode(sent, type=EngineCoreRequest).thinking == request.thinking
