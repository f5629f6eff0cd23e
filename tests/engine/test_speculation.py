"""Tokens verified several at a time, over a fake device that trusts no plan."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from random import Random

import numpy as np
import pytest

from jaxinfer.engine.messages import FinishReason
from jaxinfer.engine.ngram import ngram_drafts
from jaxinfer.engine.speculation import ExecutorSource
from tests.engine.core_runs import alone, make_core, run
from tests.engine.fake_requests import (
    BLOCK_SIZE,
    MAX_MODEL_LEN,
    hashed_token,
    make_request,
    speculative,
)
from tests.engine.test_grammars import EOS, ListGrammars, check, random_requests


def naive_ngram(tokens: list[int], longest: int, shortest: int, k: int) -> list[int]:
    for n in range(longest, shortest - 1, -1):
        for start in range(len(tokens) - n):
            if n <= len(tokens) and tokens[start : start + n] == tokens[-n:]:
                return tokens[start + n : start + n + k]
    return []


def test_ngrams_against_a_naive_search() -> None:
    rng = np.random.default_rng(3)
    found = 0
    for _ in range(3000):
        tokens = rng.integers(0, rng.integers(1, 6), rng.integers(1, 24)).astype(np.int32)
        shortest = int(rng.integers(1, 4))
        limits = int(rng.integers(shortest, 6)), shortest, int(rng.integers(1, 6))
        drafts = ngram_drafts(tokens, *limits)
        assert drafts.tolist() == naive_ngram(tokens.tolist(), *limits)
        found += len(drafts) > 0
    assert 1000 < found < 3000


def periodic(context: Sequence[int]) -> int:
    """Goes round in circles of seven, whatever the prompt is."""
    return (context[-1] + 1) % 7


def accepted(outputs: list) -> int:
    stats = [o.stats.spec_decode for o in outputs if o.stats is not None and o.stats.spec_decode]
    return sum(s.num_accepted_tokens for s in stats)


@pytest.mark.parametrize("wrong", [0, 1, 2, 5], ids=["right", "wrong", "half", "mostly right"])
@pytest.mark.parametrize("jump_ahead", [True, False], ids=["jump", "no jump"])
@pytest.mark.parametrize("num_blocks", [60, 11])
def test_random_mixes_give_what_one_token_after_the_other_gives(wrong, jump_ahead, num_blocks):
    """Grammars, stop tokens, limits, preemption, chunked prompts in the same steps."""
    preemptions = right = 0
    for seed in range(20):
        core, _ = make_core(
            num_blocks,
            grammars=ListGrammars(),
            jump_ahead_max_rows=64 * jump_ahead,
            threshold=3,
            speculative=speculative(1 + seed % 4),
            wrong_guesses=wrong,
        )
        requests = random_requests(Random(seed), 8)
        collected = run(core, requests)
        check(collected, requests)
        assert core.scheduler.kv.pool.num_free == num_blocks - 1
        preemptions += sum(o.stats.num_preemptions for o in collected.outputs if o.stats)
        right += accepted(collected.outputs)
    assert (preemptions > 0) == (num_blocks == 11)
    if wrong != 1:
        assert right > 50


@pytest.mark.parametrize("wrong", [0, 2])
def test_token_rules_hold_within_a_run(wrong):
    """min_tokens, bad words, allowed ids and stop tokens, against each request alone."""
    for seed in range(30):
        rng = Random(seed)
        requests = []
        for i in range(5):
            wanted = alone(make_request(str(i), 4, max_tokens=12))[0]
            requests.append(
                make_request(
                    str(i),
                    4,
                    eos=rng.sample(wanted, 1),
                    stop_token_ids=rng.sample(wanted, 1),
                    min_tokens=rng.randint(0, 8),
                    max_tokens=rng.randint(8, 14),
                    bad_words_token_ids=[wanted[2:4], wanted[5:6], wanted[6:9]][: rng.randint(0, 3)]
                    or None,
                )
            )
        core, _ = make_core(speculative=speculative(4), wrong_guesses=wrong)
        collected = run(core, requests)
        for request in requests:
            got = collected.tokens[request.request_id], collected.ends[request.request_id]
            assert got == alone(request)


@pytest.mark.parametrize(
    ("params", "num_tokens"),
    [
        ({"allowed_token_ids": [5], "bad_words_token_ids": [[5, 5, 5]]}, 2),
        ({"allowed_token_ids": [5], "bad_words_token_ids": [[5]]}, 0),
    ],
)
def test_a_request_left_without_tokens_gets_those_before(params, num_tokens):
    core, _ = make_core(speculative=speculative(4), wrong_guesses=0, next_token=lambda context: 5)
    collected = run(core, [make_request("a", 4, max_tokens=6, **params)])
    assert collected.ends["a"][0] is FinishReason.ERROR
    assert "No token may be sampled" in str(collected.ends["a"][1])
    assert collected.tokens.get("a", []) == [5] * num_tokens


def test_logits_that_are_no_number_fail_after_the_same_tokens():
    for poisoned in range(4, 12):
        ends = []
        for config in ({}, {"speculative": speculative(3), "wrong_guesses": 0}):
            core, executor = make_core(**config)
            executor.is_invalid = lambda context, n=poisoned: len(context) >= n
            collected = run(core, [make_request("a", 4, max_tokens=9)])
            ends.append((collected.tokens.get("a"), collected.ends["a"]))
        assert ends[0] == ends[1]


def test_right_guesses_save_steps():
    request = make_request("a", 4, max_tokens=25)
    steps = {}
    for k in (0, 1, 4):
        config = {"speculative": speculative(k), "wrong_guesses": 0} if k else {}
        core, executor = make_core(**config)
        assert run(core, [request]).tokens["a"] == alone(request)[0]
        steps[k] = len(executor.plans)
    # One for the prompt, then k + 1 tokens a step.
    assert steps == {0: 25, 1: 13, 4: 6}


def test_ngrams_find_what_repeats():
    request = make_request("a", [0, 1, 2, 3, 4, 5, 6, 0, 1], max_tokens=20)
    config = speculative(4, prompt_lookup_max=2)
    core, executor = make_core(next_token=periodic, speculative=config)
    collected = run(core, [request])
    assert collected.tokens["a"] == alone(request, periodic)[0]
    assert len(executor.plans) == 5
    last = executor.plans[-1].drafts
    assert last is not None and last.num_drafts.tolist() == [3]  # room for three and one more


def test_what_is_counted():
    core, _ = make_core(
        next_token=periodic, speculative=speculative(3), wrong_guesses=4, max_num_seqs=2
    )
    requests = [make_request("a", 3, max_tokens=13), make_request("b", 3, max_tokens=9)]
    collected = run(core, requests)
    drafted, right, positions = 0, 0, [0] * 3
    for outputs in collected.outputs:
        stats = outputs.stats.spec_decode
        assert (stats is None) == (not outputs.num_drafted)
        if stats is None:
            continue
        assert stats.num_drafts == len(outputs.num_drafted)
        assert stats.num_draft_tokens == sum(n for n, _ in outputs.num_drafted.values())
        assert stats.num_accepted_tokens == sum(n for _, n in outputs.num_drafted.values())
        for i, count in enumerate(stats.num_accepted_tokens_per_pos):
            positions[i] += count
        drafted += stats.num_draft_tokens
        right += stats.num_accepted_tokens
        counts = dict(zip(outputs.request_ids, outputs.num_tokens, strict=True))
        for name, (_, accepted_tokens) in outputs.num_drafted.items():
            assert counts[name] == accepted_tokens + 1
    assert sum(positions) == right < drafted
    assert positions == sorted(positions, reverse=True) and positions[0] > positions[2] > 0


def test_too_many_rows_draft_nothing():
    config = speculative(3, disable_by_batch_size=2)
    core, executor = make_core(speculative=config, wrong_guesses=0)
    requests = [make_request(str(i), 3, max_tokens=4 + 6 * (i == 0)) for i in range(3)]
    collected = run(core, requests)
    for request in requests:
        assert collected.tokens[request.request_id] == alone(request)[0]
    drafts = [(len(p.rows), int(p.drafts.num_drafts.sum())) for p in executor.plans]
    assert all(total == 0 for rows, total in drafts if rows == 3)
    assert any(total for _, total in drafts)


@pytest.mark.parametrize("budget", [4, 5, 6, 9])
def test_guesses_stay_within_the_budget(budget):
    """The fake device checks that; here, that the guesses don't hold up prompts or anybody."""
    core, executor = make_core(budget=budget, speculative=speculative(6), wrong_guesses=0)
    requests = [make_request(str(i), 9, max_tokens=8) for i in range(4)]
    collected = run(core, requests)
    for request in requests:
        assert collected.tokens[request.request_id] == alone(request)[0]
    assert any(plan.drafts.num_drafts.any() for plan in executor.plans)


def test_nobody_is_preempted_for_a_guess():
    """Two requests that fit exactly: what is drafted beyond a row's own blocks would take the other's."""
    size = MAX_MODEL_LEN // BLOCK_SIZE
    core, executor = make_core(
        1 + size, speculative=speculative(8), wrong_guesses=0, prefix_caching=False
    )
    requests = [make_request(str(i), 4, max_tokens=12) for i in range(2)]
    collected = run(core, requests)
    for request in requests:
        assert collected.tokens[request.request_id] == alone(request)[0]
    assert not sum(o.stats.num_preemptions for o in collected.outputs if o.stats)
    assert any(plan.drafts.num_drafts.any() for plan in executor.plans)


def test_only_verified_tokens_are_found_in_the_prefix_cache():
    """Wrong guesses fill blocks; the fake device notices when one of them is shared."""
    core, _ = make_core(speculative=speculative(8), wrong_guesses=3)
    prompt = make_request("a", 6).prompt_token_ids
    first = run(core, [make_request("a", prompt, max_tokens=20)]).tokens["a"]
    for n in range(1, 20):
        request = make_request(f"b{n}", [*prompt, *first[:n]], max_tokens=6)
        collected = run(core, [request])
        assert collected.tokens[request.request_id] == alone(request)[0]
    assert core.scheduler.kv.pool.num_free == 63


def test_logprobs_come_with_each_token_of_a_run():
    core, executor = make_core(speculative=speculative(4), wrong_guesses=3)
    executor.num_logprobs = 2
    requests = [
        make_request("a", 3, max_tokens=13, logprobs=2),
        make_request("b", 9, max_tokens=11),
        make_request("c", 5, max_tokens=9, logprobs=0),
    ]
    collected = run(core, requests)
    scored: dict[str, list[int]] = {"a": [], "b": [], "c": []}
    for outputs in collected.outputs:
        index = 0
        for name, count in zip(outputs.request_ids, outputs.num_tokens or [1] * 9, strict=False):
            for _ in range(count):
                if index in outputs.logprobs:
                    scored[name].append(outputs.logprobs[index].token_ids[0])
                    assert outputs.logprobs[index].token_ids[0] == outputs.token_ids[index]
                index += 1
    assert scored == {"a": collected.tokens["a"], "b": [], "c": collected.tokens["c"]}


def test_a_guess_that_the_grammar_refuses_is_the_last():
    core, executor = make_core(grammars=ListGrammars(), speculative=speculative(6), wrong_guesses=0)
    places = [[(i * 7) % 40 + 10, (i * 7 + 1) % 40 + 10] for i in range(12)]
    request = make_request("a", 3, eos=[EOS], grammar=json.dumps(places), max_tokens=20)
    check(run(core, [request]), [request])
    for plan in executor.plans[1:]:
        context = executor._rows[0].tokens
        guesses = plan.drafts.token_ids.tolist()
        start = int(plan.num_computed[0]) + 1 - 3
        fits = [token in place for token, place in zip(guesses, places[start:], strict=False)]
        assert all(fits[:-1])
        assert len(context) == 3 + 13


def test_the_executor_own_guesses_go_into_the_next_step():
    """Drafts that come with results: by row, up to the first -1, gone if a step passes them over."""
    core, executor = make_core(speculative=speculative(3))
    source = core.scheduler.speculation.source = ExecutorSource(core.scheduler.table)
    original = executor._result

    def with_drafts(plan, *rest):
        result = original(plan, *rest)
        drafts = np.full((len(plan.rows), 3), -1, np.int32)
        for i, row in enumerate(plan.rows.tolist()):
            context = list(executor._rows[row].tokens)
            for j in range(2):
                drafts[i, j] = hashed_token(context)
                context.append(drafts[i, j])
        return replace(result, draft_token_ids=drafts)

    executor._result = with_drafts
    requests = [make_request("a", 4, max_tokens=12), make_request("b", 7, max_tokens=12)]
    collected = run(core, requests)
    for request in requests:
        assert collected.tokens[request.request_id] == alone(request)[0]
    assert len(executor.plans) == 5
    assert max(int(plan.drafts.num_drafts.max()) for plan in executor.plans) == 2
    source.clear()
    assert not len(source.drafts(0, 3))
