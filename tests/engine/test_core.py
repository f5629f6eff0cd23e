from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence

import pytest

from jaxinfer.engine.errors import EngineDeadError
from jaxinfer.engine.messages import FinishReason
from jaxinfer.engine.request import RequestState
from tests.engine.core_runs import Collected, alone, make_core, run
from tests.engine.fake_requests import MAX_MODEL_LEN, VOCAB, hashed_token, make_request

EOS = 49


def counter(context: Sequence[int]) -> int:
    """The next token is the length of what is there."""
    return len(context)


def tasks(count: int = 8) -> list:
    """Requests of many lengths, with stops that hashed tokens now and then hit."""
    return [
        make_request(
            f"r{i}",
            1 + (i * 5) % 13,
            eos=[EOS, 3, 4],
            stop_token_ids=[7, 8],
            min_tokens=i % 4,
            max_tokens=3 + (i * 7) % 17,
        )
        for i in range(count)
    ]


@pytest.mark.parametrize(
    "config",
    [
        {"overlap": overlap, "budget": budget, "threshold": threshold, "num_blocks": blocks}
        for overlap, (budget, threshold), blocks in itertools.product(
            (True, False), ((64, 0), (4, 0), (16, 3)), (64, 9)
        )
    ],
    ids=str,
)
def test_the_same_tokens_whatever_the_batch(config: dict) -> None:
    core, _ = make_core(**config)
    requests = tasks()
    collected = run(core, requests)
    for request in requests:
        got = collected.tokens[request.request_id], collected.ends[request.request_id]
        assert got == alone(request)
    assert core.scheduler.kv.pool.num_free == config["num_blocks"] - 1
    assert core.scheduler.table.num_free == 4
    assert {collected.ends[r.request_id][0] for r in requests} == {
        FinishReason.STOP,
        FinishReason.LENGTH,
    }


def test_a_step_is_launched_before_the_one_before_it_is_read() -> None:
    core, executor = make_core()
    run(core, [make_request("a", 3, max_tokens=4)])
    assert "".join(entry[0] for entry in executor.log) == "es" + "esr" * 3 + "r"

    core, executor = make_core(overlap=False)
    run(core, [make_request("a", 3, max_tokens=4)])
    assert "".join(entry[0] for entry in executor.log) == "esr" * 4


def test_nothing_is_computed_beyond_max_tokens() -> None:
    core, executor = make_core()
    run(core, [make_request("a", 3, max_tokens=4), make_request("b", 3, max_tokens=6)])
    assert [plan.num_tokens for plan in executor.plans] == [6, 2, 2, 2, 1, 1]


def test_what_a_step_in_flight_brings_after_eos_is_dropped_and_the_row_passes_on() -> None:
    core, executor = make_core(max_num_seqs=1, next_token=counter)
    # a: tokens 3, 4, 5 and 5 is its EOS. By then the step for its fourth token is in flight.
    requests = [
        make_request("a", [1, 1, 1], eos=[5], max_tokens=10),
        make_request("b", [2, 2], max_tokens=3),
    ]
    collected = run(core, requests)
    assert collected.tokens == {"a": [3, 4, 5], "b": [2, 3, 4]}
    assert collected.ends == {"a": (FinishReason.STOP, None), "b": (FinishReason.LENGTH, None)}
    assert [plan.num_tokens for plan in executor.plans] == [3, 1, 1, 1, 2, 1, 1]
    assert {int(row) for plan in executor.plans for row in plan.rows} == {0}


def test_a_leftover_step_does_not_disturb_the_next_request() -> None:
    core, _ = make_core(next_token=counter)
    run(core, [make_request("a", [1, 1, 1], eos=[4], max_tokens=10)])
    collected = run(core, [make_request("a", [1] * 5, max_tokens=3)])
    assert collected.tokens == {"a": [5, 6, 7]}


def abort_in(state: RequestState) -> None:
    """Abort "a" when it is in `state`; the others' tokens and the pool must not notice."""
    core, _ = make_core(num_blocks=12, max_num_seqs=3, max_model_len=24)
    others = [make_request(name, 8, max_tokens=14) for name in "bc"]
    collected = Collected()
    for request in [*others, make_request("a", 8, max_tokens=14)]:
        core.add_request(request)
    aborted = False
    while core.has_unfinished():
        request = core.scheduler.requests.get("a")
        if request is not None and request.state is state:
            core.abort_requests(["a", "unknown"])
            aborted = True
            assert request.state is RequestState.FINISHED
            told = len(collected.tokens.get("a", []))
        collected.add(core.step())
    assert aborted and "a" not in collected.ends
    assert len(collected.tokens.get("a", [])) == told, "a token after the abort"
    for other in others:
        assert collected.tokens[other.request_id] == alone(other, max_model_len=24)[0]
    assert core.scheduler.kv.pool.num_free == 11
    core.abort_requests(["a"])


@pytest.mark.parametrize(
    "state", [RequestState.WAITING, RequestState.RUNNING, RequestState.PREEMPTED]
)
def test_abort(state: RequestState) -> None:
    abort_in(state)


def test_an_aborted_id_may_be_used_again_at_once() -> None:
    core, _ = make_core(next_token=counter)
    core.add_request(make_request("a", [0] * 3, max_tokens=9))
    for _ in range(3):
        core.step()
    core.abort_requests(["a"])
    collected = run(core, [make_request("a", [0] * 6, max_tokens=2)])
    assert collected.tokens == {"a": [6, 7]}


def test_a_request_preempted_in_flight_still_gets_its_token() -> None:
    """Stops at the token that comes back while it waits, and is not admitted again."""
    core, executor = make_core(num_blocks=7, max_model_len=24, next_token=counter)
    stop = None
    for attempt in range(2):
        if attempt:
            core, executor = make_core(num_blocks=7, max_model_len=24, next_token=counter)
        core.add_request(make_request("a", [0] * 8, max_tokens=16))
        core.add_request(
            make_request("b", [0] * 8, max_tokens=16, eos=[] if stop is None else [stop])
        )
        collected = Collected()
        while core.has_unfinished():
            request = core.scheduler.requests.get("b")
            before = request.num_preemptions if request else 0
            collected.add(core.step())
            if request and request.num_preemptions > before and stop is None:
                # The step that preempted b also read the token that b had in flight.
                assert request.num_in_flight == 0
                stop = collected.tokens["b"][-1]
                assert collected.outputs[-1].request_ids == ["a", "b"]
        assert collected.tokens["a"] == list(range(8, 24))
    assert stop is not None
    assert collected.ends["b"] == (FinishReason.STOP, None)
    assert collected.tokens["b"] == list(range(8, stop + 1))
    assert [len(plan.admitted) for plan in executor.plans].count(1) == 0


@pytest.mark.parametrize("where", ["execute_model", "sample_tokens", "result"])
def test_an_executor_that_raises_ends_everything_loudly(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    core, executor = make_core(max_num_seqs=1)
    for name in "ab":
        core.add_request(make_request(name, 3, max_tokens=9))
    core.step()

    def fail(*args: object) -> None:
        raise RuntimeError("the device is on fire")

    target = executor.unread[0] if where == "result" else executor
    monkeypatch.setattr(target, where, fail)
    collected = Collected()
    while core.has_unfinished():
        collected.add(core.step())
    end = (FinishReason.ERROR, "RuntimeError: the device is on fire")
    assert collected.ends == {"a": end, "b": end}
    for call in (core.step, lambda: core.add_request(make_request("c"))):
        with pytest.raises(EngineDeadError, match="on fire") as caught:
            call()
        assert isinstance(caught.value.__cause__, RuntimeError)
    assert core.scheduler.kv.pool.num_free == 63


def test_an_interrupted_wait_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    core, executor = make_core()
    request = make_request("a", 3, max_tokens=9)
    core.add_request(request)
    collected = Collected()
    for _ in range(3):
        collected.add(core.step())

    def interrupt() -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(executor.unread[0], "result", interrupt)
        with pytest.raises(KeyboardInterrupt):
            core.step()
    while core.has_unfinished():
        collected.add(core.step())
    assert collected.tokens["a"] == alone(request)[0]


def test_an_interrupted_launch_is_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    core, executor = make_core()
    core.add_request(make_request("a", 3, max_tokens=9))

    def interrupt(plan: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(executor, "execute_model", interrupt)
    with pytest.raises(KeyboardInterrupt):
        core.step()
    with pytest.raises(EngineDeadError, match="KeyboardInterrupt"):
        core.add_request(make_request("b"))


def test_bad_requests_are_refused() -> None:
    core, _ = make_core()
    core.add_request(make_request("a", max_tokens=3))
    with pytest.raises(ValueError, match="'a' is already in use"):
        core.add_request(make_request("a", max_tokens=3))
    with pytest.raises(ValueError, match="prompt_token_ids of request 'b' is empty"):
        core.add_request(make_request("b", []))
    with pytest.raises(ValueError, match=r"32 tokens.*max_model_len \(32\); use at most 31"):
        core.add_request(make_request("b", MAX_MODEL_LEN))
    assert list(run(core).ends) == ["a"]


def test_a_cache_too_small_for_one_request_is_refused() -> None:
    with pytest.raises(ValueError, match="needs 8 blocks of 4 tokens, and there are 7") as caught:
        make_core(num_blocks=8)
    for what in (
        "max_model_len to at most 28",
        "gpu_memory_utilization",
        "kv_cache_memory_bytes",
        "num_gpu_blocks_override",
    ):
        assert what in str(caught.value)
    core, _ = make_core(num_blocks=9)
    request = make_request("a", 1, max_tokens=None)
    assert run(core, [request]).tokens["a"] == alone(request)[0]


def test_host_work_of_a_steady_step_does_not_grow_with_the_batch() -> None:
    """Counted in calls, not in time: array arithmetic makes as many for 64 requests as for 4."""

    def calls(num_requests: int) -> int:
        core, executor = make_core(num_blocks=1000, max_num_seqs=64, budget=512, block_size=16)
        for i in range(num_requests):
            core.add_request(make_request(str(i), 4, max_tokens=12))
        for _ in range(4):
            core.step()
        step = core.scheduler.schedule()
        assert step is not None and len(step.plan.rows) == num_requests
        executor.execute_model(step.plan)
        result = executor.sample_tokens(None)
        count = 0

        def count_calls(frame: object, event: str, argument: object) -> None:
            nonlocal count
            count += event in ("call", "c_call")

        in_flight, handle = core._in_flight.popleft()
        sys.setprofile(count_calls)
        try:
            core.scheduler.update(in_flight, handle._result)
            core.scheduler.schedule()
        finally:
            sys.setprofile(None)
        assert result is not None
        return count

    assert calls(64) == calls(4)


def test_the_hash_is_a_fair_sample_of_the_vocabulary() -> None:
    """The oracle above would prove little if the fake model said the same thing all the time."""
    tokens = {hashed_token([i, i * i]) for i in range(200)}
    assert len(tokens) > VOCAB // 2
