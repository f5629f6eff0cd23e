"""Outputs that follow grammars, over a fake device and a grammar that is a list: what may stand at each place."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from random import Random

import numpy as np
import pytest

from jaxinfer.engine.grammars import Matcher
from jaxinfer.engine.messages import EngineCoreRequest, FinishReason
from jaxinfer.engine.plan import Words
from tests.engine.core_runs import Collected, make_core, run
from tests.engine.fake_requests import MAX_MODEL_LEN, VOCAB, hashed_token, make_request

EOS = 7
"""What ends a grammar, once nothing of it is left."""


class ListMatcher:
    def __init__(self, places: Sequence[Sequence[int]]) -> None:
        self.places = [list(place) for place in places]
        self.accepted: list[int] = []

    def copy(self) -> ListMatcher:
        copy = ListMatcher(self.places)
        copy.accepted = list(self.accepted)
        return copy

    def allowed(self) -> list[int]:
        done = len(self.accepted)
        return self.places[done] if done < len(self.places) else [EOS]

    def accept(self, token: int) -> str | None:
        if token not in self.allowed():
            return f"{token} may not follow {self.accepted}"
        self.accepted.append(token)
        return None

    def num_valid(self, tokens: list[int]) -> int:
        copy = self.copy()
        return next((i for i, t in enumerate(tokens) if copy.accept(t)), len(tokens))

    def forced_tokens(self) -> list[int]:
        rest = self.places[len(self.accepted) :]
        lengths = [len(place) for place in rest] + [2]
        return [place[0] for place in rest[: next(i for i, n in enumerate(lengths) if n > 1)]]

    @property
    def is_finished(self) -> bool:
        return len(self.accepted) > len(self.places)


class ListGrammars:
    """A grammar is the places as JSON. `compiled` counts calls; `gate` holds them up."""

    def __init__(self) -> None:
        self.compiled = 0
        self.gate = threading.Event()
        self.gate.set()

    def compile(self, grammar: str) -> ListMatcher:
        assert self.gate.wait(30)
        self.compiled += 1
        return ListMatcher(json.loads(grammar))

    def fill_masks(self, matchers: Sequence[tuple[Matcher, int]], words: Words) -> None:
        for matcher, row in matchers:
            assert isinstance(matcher, ListMatcher)
            words[row] = 0
            for token in matcher.allowed():
                words[row, token // 32] |= np.uint32(1 << (token % 32))


def naive(request: EngineCoreRequest) -> tuple[list[int], FinishReason]:
    """One token after the other, with nothing clever in between."""
    places = None if request.grammar is None else json.loads(request.grammar)
    params, prompt, output = request.sampling_params, request.prompt_token_ids, []
    while True:
        allowed = list(range(VOCAB))
        if places is not None:
            allowed = places[len(output)] if len(output) < len(places) else [EOS]
        if len(output) < params.min_tokens and len(allowed) > 1:
            allowed = [t for t in allowed if t not in request.eos_token_ids] or allowed
        token = hashed_token([*prompt, *output])
        while token not in allowed:
            token = (token + 1) % VOCAB
        output.append(token)
        stops = [*request.eos_token_ids, *(params.stop_token_ids or [])]
        if token in stops and len(output) >= params.min_tokens:
            return output, FinishReason.STOP
        if places is not None and len(output) > len(places):
            return output, FinishReason.STOP
        if len(output) == params.max_tokens or len(prompt) + len(output) == MAX_MODEL_LEN:
            return output, FinishReason.LENGTH


def random_requests(rng: Random, count: int) -> list[EngineCoreRequest]:
    requests = []
    for i in range(count):
        grammar = None
        if rng.random() < 0.75:
            places = [
                rng.sample(range(10, VOCAB), rng.choice((1, 1, 1, 2, 5)))
                for _ in range(rng.randint(0, 12))
            ]
            grammar = json.dumps(places)
        requests.append(
            make_request(
                str(i),
                rng.randint(1, 12),
                eos=rng.choice(([EOS], [])),
                grammar=grammar,
                max_tokens=rng.randint(1, 16),
                stop_token_ids=rng.sample(range(10, VOCAB), 2),
            )
        )
    return requests


def check(collected: Collected, requests: Sequence[EngineCoreRequest]) -> None:
    for request in requests:
        tokens, reason = naive(request)
        assert collected.tokens[request.request_id] == tokens
        assert collected.ends[request.request_id][0] is reason


@pytest.mark.parametrize("jump_ahead", [True, False])
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("num_blocks", [60, 11])
def test_random_mixes_give_what_one_token_after_the_other_gives(jump_ahead, overlap, num_blocks):
    """11 blocks are hardly more than one request can need: rows are preempted, also between a jump and its result."""
    preemptions = 0
    for seed in range(40):
        core, executor = make_core(
            num_blocks,
            grammars=ListGrammars(),
            jump_ahead_max_rows=64 * jump_ahead,
            overlap=overlap,
        )
        requests = random_requests(Random(seed), 8)
        collected = run(core, requests)
        check(collected, requests)
        assert core.scheduler.kv.pool.num_free == num_blocks - 1
        assert any(plan.forced for plan in executor.plans) <= jump_ahead
        preemptions += sum(o.stats.num_preemptions for o in collected.outputs if o.stats)
    assert (preemptions > 0) == (num_blocks == 11)


def test_forced_tokens_take_one_step():
    grammar = json.dumps([[11, 12], *([i] for i in range(20, 30)), [13, 14]])
    steps = {}
    for jump_ahead in (True, False):
        core, executor = make_core(grammars=ListGrammars(), jump_ahead_max_rows=64 * jump_ahead)
        request = make_request("a", 3, eos=[EOS], grammar=grammar, max_tokens=20)
        check(run(core, [request]), [request])
        steps[jump_ahead] = len(executor.plans)
    # The prompt, the token that begins the run, the run, the last choice, the end (and one more planned ahead of it).
    assert steps[True] <= 6 and steps[False] >= 13


@pytest.mark.parametrize("max_rows", [2, 3])
def test_steps_of_many_requests_take_forced_tokens_one_by_one(max_rows):
    grammar = json.dumps([[i] for i in range(20, 30)])
    core, executor = make_core(grammars=ListGrammars(), jump_ahead_max_rows=max_rows)
    requests = [make_request(i, 3, eos=[EOS], grammar=grammar, max_tokens=20) for i in "abc"]
    check(run(core, requests), requests)
    assert any(plan.forced for plan in executor.plans) == (max_rows == 3)


@pytest.mark.parametrize(
    "params",
    [dict(logprobs=1), dict(frequency_penalty=0.5), dict(allowed_token_ids=list(range(VOCAB)))],
)
def test_nothing_is_jumped_over_where_each_token_counts(params):
    core, executor = make_core(grammars=ListGrammars())
    if "logprobs" in params:
        executor.num_logprobs = 1
    grammar = json.dumps([[i] for i in range(20, 30)])
    collected = run(core, [make_request("a", 3, eos=[EOS], grammar=grammar, **params)])
    assert collected.tokens["a"] == [*range(20, 30), EOS]
    assert not any(plan.forced for plan in executor.plans)


def test_logprobs_stay_with_their_tokens_beside_a_row_that_jumps():
    core, executor = make_core(grammars=ListGrammars())
    executor.num_logprobs = 0
    requests = [
        make_request("a", 3, eos=[EOS], grammar=json.dumps([[i] for i in range(20, 30)])),
        make_request("b", 3, logprobs=0, max_tokens=6),
    ]
    collected = run(core, requests)
    scored = []
    for outputs in collected.outputs:
        for index, logprobs in outputs.logprobs.items():
            assert logprobs.token_ids[0] == outputs.token_ids[index]
            scored.append(outputs.token_ids[index])
    assert scored == collected.tokens["b"]


def test_min_tokens_keeps_the_end_away_but_not_that_of_the_grammar():
    core, _ = make_core(grammars=ListGrammars())
    grammar = json.dumps([[20, EOS], [21], [22, 23]])
    [request] = [make_request("a", 3, eos=[EOS], grammar=grammar, min_tokens=9, max_tokens=12)]
    collected = run(core, [request])
    assert collected.tokens["a"][0] == 20 and collected.tokens["a"][-1] == EOS
    assert len(collected.tokens["a"]) == 4 and collected.ends["a"][0] is FinishReason.STOP


def test_others_run_while_a_grammar_compiles():
    grammars = ListGrammars()
    grammars.gate.clear()
    core, _ = make_core(grammars=grammars)
    guided = make_request("guided", 3, eos=[EOS], grammar=json.dumps([[20], [21, 22]]))
    core.add_request(guided)
    core.add_request(plain := make_request("plain", 3, max_tokens=4))
    collected = Collected()
    deferred = []
    for _ in range(20):
        collected.add(outputs := core.step())
        if outputs.stats is not None:
            deferred.append(outputs.stats.num_deferred)
    check(collected, [plain])
    assert deferred and set(deferred) == {1}
    assert "guided" not in collected.tokens and core.has_unfinished()
    grammars.gate.set()
    for _ in range(500):
        if not core.has_unfinished():
            break
        collected.add(core.step())
    check(collected, [guided])


def test_an_abort_while_a_grammar_compiles():
    grammars = ListGrammars()
    grammars.gate.clear()
    core, _ = make_core(grammars=grammars)
    core.add_request(make_request("a", 3, grammar="[[20]]"))
    core.step()
    core.abort_requests(["a"])
    assert not core.has_unfinished()
    grammars.gate.set()
    core.add_request(again := make_request("a", 3, eos=[EOS], grammar="[[20]]"))
    check(run(core, [other := make_request("b", 2, max_tokens=3)]), [again, other])


def test_equal_grammars_are_compiled_once():
    grammars = ListGrammars()
    core, _ = make_core(grammars=grammars)
    same = [make_request(str(i), 3, eos=[EOS], grammar="[[20, 21], [22, 23]]") for i in range(6)]
    check(run(core, same), same)
    assert grammars.compiled == 1


def test_a_grammar_that_can_not_be_compiled_ends_its_request_alone():
    core, _ = make_core(grammars=ListGrammars())
    good = make_request("good", 3, eos=[EOS], grammar="[[20], [21, 22]]")
    collected = run(core, [make_request("bad", 3, grammar="[["), good])
    reason, text = collected.ends["bad"]
    assert reason is FinishReason.ERROR and str(text).startswith("structured_outputs:")
    check(collected, [good])


def test_a_token_that_the_grammar_refuses_ends_its_request_alone(monkeypatch):
    """The masks should exclude it; if one doesn't, nothing may pass in silence."""
    core, _ = make_core(grammars=ListGrammars())
    monkeypatch.setattr(ListGrammars, "fill_masks", lambda *args: None)
    plain = make_request("plain", 3, max_tokens=4)
    collected = run(core, [make_request("a", 3, grammar="[[20], [21]]"), plain])
    reason, text = collected.ends["a"]
    assert reason is FinishReason.ERROR and "may not follow" in str(text)
    check(collected, [plain])


def test_without_a_backend_grammars_are_refused():
    core, _ = make_core()
    with pytest.raises(ValueError, match="structured_outputs"):
        core.add_request(make_request("a", 3, grammar="[[20]]"))
    assert not core.has_unfinished()
