from __future__ import annotations

from collections import Counter

import msgspec
import numpy as np
import pytest

from jaxinfer.engine import step_log
from jaxinfer.engine.anatomy import MAX_CELLS, MAX_REQUESTS, MAX_STEPS
from jaxinfer.engine.block_pool import BlockPool, BlockState
from jaxinfer.engine.core import EngineCore
from tests.engine.blocks_by_hand import STATES, check_blocks
from tests.engine.core_runs import make_core
from tests.engine.fake_executor import FakeExecutor
from tests.engine.fake_requests import make_request, speculative


@pytest.mark.parametrize("windows", [(None,), (None, 6)])
def test_blocks_are_counted_as_by_hand(windows):
    core, _ = make_core(num_blocks=200, max_num_seqs=4, windows=windows)
    shared = list(range(1, 13))
    seen: set[str] = set()
    for wave in range(3):
        for i in range(5):
            core.add_request(make_request(f"{wave}-{i}", [*shared, 20 + i], max_tokens=4 + i))
        while core.has_unfinished():
            core.step()
            seen.update(check_blocks(core, core.anatomy()))
    assert seen == set(STATES)


@pytest.mark.parametrize("num_blocks", [2, 3, MAX_CELLS, MAX_CELLS + 1, MAX_CELLS + 2, 5000])
def test_a_large_pool_has_no_more_cells_than_fit(num_blocks):
    core, _ = make_core(num_blocks=max(num_blocks, 9))
    core.add_request(make_request("a", 9, max_tokens=2))
    core.step()
    cells = core.anatomy()["blocks"]["cells"]
    check_blocks(core, core.anatomy())
    assert len(cells["free"]) <= MAX_CELLS
    assert cells["blocks_per_cell"] == -(-(core.num_blocks - 1) // MAX_CELLS)


def test_states_of_a_pool():
    pool = BlockPool(6)
    first, second, third, _ = pool.allocate(4)
    pool.register([first, second], [b"a", b"b"])
    pool.share(second)
    pool.free([first, third])
    names = [BlockState(state).name for state in pool.states()]
    assert names == ["CACHED", "SHARED", "FREE", "IN_USE", "FREE"]
    pool.forget()
    assert BlockState.CACHED not in pool.states()


def test_requests_are_told_as_they_stand():
    core, _ = make_core(max_num_seqs=2, budget=8)
    prompt = list(range(1, 11))
    core.add_request(make_request("first", prompt, max_tokens=6, arrival_time=1.0))
    core.add_request(make_request("second", 5, max_tokens=9))
    core.add_request(make_request("third", [*prompt, 7], max_tokens=3, priority=4))
    core.step()
    requests = core.anatomy()["requests"]
    assert (requests["num_running"], requests["num_waiting"]) == (1, 2)
    [one] = requests["running"]
    # A chunk of the budget's 8 tokens, in 2 blocks of 4.
    assert one["id"] == "first" and one["state"] == "running" and one["age_seconds"] > 1
    numbers = [
        one[f"num_{n}"] for n in ("prompt_tokens", "output_tokens", "computed_tokens", "blocks")
    ]
    assert numbers == [10, 0, 8, 2]
    assert [r["id"] for r in requests["waiting"]] == ["second", "third"]
    assert requests["waiting"][1]["priority"] == 4
    outputs = 0
    while "first" in core.scheduler.requests:
        outputs += core.step().request_ids.count("first")
        told = {r["id"]: r for r in core.anatomy()["requests"]["running"]}
        if "first" in told:
            assert told["first"]["num_output_tokens"] == outputs
    while core.has_unfinished():
        for request in core.anatomy()["requests"]["running"]:
            if request["id"] == "third":
                assert request["num_cached_tokens"] == 8
        core.step()
    requests = core.anatomy()["requests"]
    assert requests == {"num_running": 0, "num_waiting": 0, "running": [], "waiting": []}


def test_preempted_requests_wait_and_hold_nothing():
    core, _ = make_core(num_blocks=9, max_num_seqs=4, prefix_caching=False)
    for name in "abc":
        core.add_request(make_request(name, 7, max_tokens=20))
    preempted = []
    while core.has_unfinished():
        core.step()
        preempted += [r for r in core.anatomy()["requests"]["waiting"] if r["num_preemptions"]]
        check_blocks(core, core.anatomy())
    assert preempted and all(r["state"] == "preempted" for r in preempted)
    assert all(r["num_blocks"] == r["num_computed_tokens"] == 0 for r in preempted)
    assert max(r["num_output_tokens"] for r in preempted) > 0


def test_the_size_is_bounded_and_no_prompt_is_told():
    core, _ = make_core(num_blocks=4000, max_num_seqs=100, budget=400)
    for i in range(300):
        core.add_request(make_request(f"r{i}", [41, 42, 43, 41 + i % 9], max_tokens=20))
    core.anatomy()
    for _ in range(15):
        core.step()
    picture = core.anatomy()
    requests, step = picture["requests"], picture["last_step"]
    assert requests["num_running"] == 100 and requests["num_waiting"] == 200
    for part in (requests["running"], requests["waiting"], step["requests"]):
        assert len(part) == MAX_REQUESTS
    assert [r["id"] for r in requests["running"]] == [f"r{i}" for i in range(MAX_REQUESTS)]
    assert [r["id"] for r in requests["waiting"]] == [f"r{100 + i}" for i in range(MAX_REQUESTS)]
    assert step["num_requests"] == 100
    text = msgspec.json.encode(picture).decode()
    assert "41,42,43" not in text and len(text) < 64_000


def by_hand(core: EngineCore, executor: FakeExecutor) -> list[tuple[int, int, int]]:
    """Prefill, decode and guessed tokens of each of the plans so far, from what each request has computed by then."""
    prompts: dict[int, int] = {}
    told = []
    for plan in executor.plans:
        for admitted in plan.admitted:
            prompts[admitted.row] = admitted.num_prompt_tokens
        prefill = decode = drafts = 0
        for i, row in enumerate(plan.rows.tolist()):
            guesses = 0 if plan.drafts is None else int(plan.drafts.num_drafts[i])
            known = int(plan.num_scheduled[i]) - guesses
            drafts += guesses
            if int(plan.num_computed[i]) >= prompts[row] and known == 1:
                decode += 1
            else:
                prefill += known
        told.append((prefill, decode, drafts))
    return told


@pytest.mark.parametrize("num_guesses", [0, 3])
def test_steps_are_told_as_they_were(num_guesses):
    more = dict(speculative=speculative(num_guesses), wrong_guesses=3) if num_guesses else {}
    core, executor = make_core(num_blocks=200, max_num_seqs=4, budget=16, **more)
    core.anatomy()
    prompt = list(range(1, 10))
    generated, accepted = [], []
    for wave in range(2):
        for i in range(5):
            core.add_request(make_request(f"{wave}{i}", [*prompt, i], max_tokens=3 + 2 * i))
        while core.has_unfinished():
            before = core._step_log.last
            outputs = core.step()
            if core._step_log.last is before:
                continue
            generated.append(len(outputs.token_ids))
            drafted = outputs.stats.spec_decode
            accepted.append(0 if drafted is None else drafted.num_accepted_tokens)
            last = core.anatomy()["last_step"]
            told = tuple(last[f"num_{kind}_tokens"] for kind in ("prefill", "decode", "draft"))
            assert told == by_hand(core, executor)[len(generated) - 1]
            assert sum(r["num_tokens"] for r in last["requests"]) == told[0] + told[1]
            assert sum(r["num_draft_tokens"] for r in last["requests"]) == told[2]
            kinds = Counter(r["kind"] for r in last["requests"])
            assert kinds["decode"] == told[1] and kinds.total() == last["num_requests"]
    recent = core.anatomy()["recent_steps"]
    expected = by_hand(core, executor)[: len(generated)][-MAX_STEPS:]
    assert list(zip(recent["prefill"], recent["decode"], recent["draft"], strict=True)) == expected
    assert recent["generated"] == generated[-MAX_STEPS:]
    assert recent["accepted"] == accepted[-MAX_STEPS:]
    assert recent["seconds_ago"] == sorted(recent["seconds_ago"], reverse=True)
    assert bool(sum(recent["accepted"])) == bool(num_guesses)


def test_nothing_is_written_down_while_nobody_looks(monkeypatch):
    core, _ = make_core()
    core.add_request(make_request("a", 5, max_tokens=4))
    while core.has_unfinished():
        core.step()
    picture = core.anatomy()
    assert picture["rates"] is None and picture["recent_steps"]["prefill"] == []
    assert picture["last_step"]["num_decode_tokens"] == 1
    core.add_request(make_request("b", 5, max_tokens=4))
    while core.has_unfinished():
        core.step()
    assert sum(core.anatomy()["recent_steps"]["generated"]) == 4
    # Long after: it begins anew.
    now = step_log._WATCH_SECONDS + 1e6
    core._step_log.watch(now)
    assert core._step_log.latest(9)["time"].size == 0


def test_rates_are_of_the_last_seconds():
    core, _ = make_core()
    log = core._step_log
    log.watch(100.0)
    assert log.rates(100.0) is None
    rng = np.random.default_rng(0)
    times = np.sort(100 + 9 * rng.random(3000))
    tokens = rng.integers(1, 50, (3000, 2))
    for time, (prefill, generated) in zip(times, tokens, strict=True):
        log._rows[log._num_added % len(log._rows)] = (time, prefill, 0, 0, 0, generated)
        log._num_added += 1
    now = 109.0
    seconds, prefill, generated = log.rates(now)
    assert seconds == pytest.approx(2.0)
    due = times > now - seconds
    assert prefill == pytest.approx(tokens[due, 0].sum() / seconds)
    assert generated == pytest.approx(tokens[due, 1].sum() / seconds)
    # More steps than are kept: what they span is looked at.
    log._rows[:, 0] = np.sort(108.5 + 0.5 * rng.random(len(log._rows)))
    log._num_added = len(log._rows) * 4
    seconds, _, generated = log.rates(now)
    assert seconds < 0.5 and generated == pytest.approx(log._rows[1:, 5].sum() / seconds)


def test_a_core_that_sleeps_says_so():
    core, _ = make_core()
    assert core.call("anatomy")["is_sleeping"] is False
    core.sleep(1)
    assert core.call("anatomy")["is_sleeping"] is True
