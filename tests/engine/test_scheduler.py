from __future__ import annotations

import pytest

from jaxinfer.engine.messages import FinishReason
from jaxinfer.engine.request import RequestState
from tests.engine.core_runs import Collected, alone, make_core, run
from tests.engine.fake_executor import FakeExecutor
from tests.engine.fake_requests import make_request


def scheduled(executor: FakeExecutor) -> list[dict[int, int]]:
    """Per step: tokens by row."""
    return [
        dict(zip(plan.rows.tolist(), plan.num_scheduled.tolist(), strict=True))
        for plan in executor.plans
    ]


def test_18_tokens_at_threshold_8_take_three_steps_and_sample_in_the_last() -> None:
    core, executor = make_core(threshold=8, overlap=False)
    collected = run(core, [make_request("a", 18, max_tokens=2)])
    assert [plan.num_scheduled.tolist() for plan in executor.plans] == [[8], [8], [2], [1]]
    assert [plan.samples.tolist() for plan in executor.plans] == [[False], [False], [True], [True]]
    assert [outputs.request_ids for outputs in collected.outputs] == [[], [], ["a"], ["a"]]


def test_the_budget_caps_a_chunk_without_a_threshold() -> None:
    core, executor = make_core(budget=7)
    run(core, [make_request("a", 18, max_tokens=1)])
    assert [plan.num_scheduled.tolist() for plan in executor.plans] == [[7], [7], [4]]


def test_one_step_mixes_decodes_and_chunks_and_decodes_come_first() -> None:
    core, executor = make_core(budget=10, threshold=6, overlap=False)
    core.add_request(make_request("a", 14, max_tokens=4))
    core.add_request(make_request("b", 2, max_tokens=4))
    core.step()
    core.step()
    # Row 0 is still in its prompt, row 1 decodes; running requests come before the new one.
    core.add_request(make_request("c", 9, max_tokens=4))
    core.step()
    core.step()
    assert scheduled(executor) == [
        {0: 6, 1: 2},
        {1: 1, 0: 6},
        {1: 1, 0: 2, 2: 6},
        {0: 1, 1: 1, 2: 3},
    ]
    assert executor.plans[1].rows.tolist() == [1, 0]
    assert executor.plans[2].rows.tolist() == [1, 0, 2]
    assert executor.plans[1].samples.tolist() == [True, False]


def test_running_requests_use_the_budget_before_waiting_ones() -> None:
    core, executor = make_core(budget=4, max_num_seqs=4, overlap=False)
    core.add_request(make_request("a", 11, max_tokens=3))
    core.add_request(make_request("b", 1, max_tokens=3))
    for _ in range(3):
        core.step()
    assert scheduled(executor) == [{0: 4}, {0: 4}, {0: 3, 1: 1}]


def test_no_more_than_max_num_seqs_run() -> None:
    core, executor = make_core(max_num_seqs=2)
    requests = [make_request(str(i), 3, max_tokens=3) for i in range(5)]
    collected = run(core, requests)
    assert max(len(plan.rows) for plan in executor.plans) == 2
    assert collected.first_scheduled == ["0", "1", "2", "3", "4"]


def test_when_blocks_run_out_the_latest_arrival_is_preempted_and_goes_to_the_front() -> None:
    # Four blocks each are needed at the end, nine are usable.
    core, _ = make_core(num_blocks=10, max_model_len=16, overlap=False)
    requests = [make_request(name, 4, max_tokens=12) for name in "abcd"]
    for request in requests:
        core.add_request(request)
    states: list[str] = []
    collected = Collected()
    while core.has_unfinished():
        collected.add(core.step())
        states.append("".join(r.request_id for r in core.scheduler.running))
    # d goes first, then c. They come back in the order of arrival, as soon as another has ended.
    order = [s for i, s in enumerate(states) if i == 0 or s != states[i - 1]]
    assert order[:3] == ["abcd", "abc", "ab"]
    assert order[-3:] == ["cd", "d", ""] or order[-2:] == ["cd", ""]
    for request in requests:
        assert (collected.tokens[request.request_id], collected.ends[request.request_id]) == alone(
            request, max_model_len=16
        )
    assert core.scheduler.kv.pool.num_free == 9
    assert sum(o.stats.num_preemptions for o in collected.outputs if o.stats) >= 2


def test_a_step_that_preempts_admits_nobody() -> None:
    """Not even a request that comes before the preempted one and that fits into the blocks it left."""
    core, _ = make_core(num_blocks=9, budget=32, policy="priority", overlap=False)
    for name in "ab":
        core.add_request(make_request(name, 15, priority=1, max_tokens=16))
    core.step()
    core.step()
    core.add_request(make_request("tiny", 1, max_tokens=2))
    core.step()
    assert core.scheduler.requests["b"].state is RequestState.PREEMPTED
    assert [r.request_id for r in core.scheduler.running] == ["a"]
    core.step()
    assert [r.request_id for r in core.scheduler.running] == ["a", "tiny"]


def test_a_request_waits_for_the_token_that_it_had_in_flight() -> None:
    """Otherwise it would compute its sequence anew without it."""
    core, executor = make_core(num_blocks=9, budget=32)
    scheduler = core.scheduler
    for name, num_tokens in (("a", 15), ("b", 16)):
        scheduler.add_request(make_request(name, num_tokens, max_tokens=16))
    first = scheduler.schedule()
    assert first is not None
    # b's second step needs a block that isn't there; meanwhile its first token is on its way.
    executor.execute_model(first.plan)
    handle = executor.sample_tokens(None)
    second = scheduler.schedule()
    assert second is not None
    b = scheduler.requests["b"]
    assert b.state is RequestState.PREEMPTED and b.num_in_flight == 1
    scheduler.finish([scheduler.requests["a"]])
    assert scheduler.schedule() is None
    scheduler.update(first, handle.result())
    again = scheduler.schedule()
    assert again is not None and len(again.plan.admitted[0].token_ids) == 17


def test_a_preempted_request_reenters_with_all_it_knows() -> None:
    core, executor = make_core(num_blocks=7, max_model_len=24, overlap=False)
    requests = [make_request(name, 6, max_tokens=12) for name in "ab"]
    collected = run(core, requests)
    again = [a for plan in executor.plans for a in plan.admitted][2:]
    assert again, "nothing was preempted"
    for admitted in again:
        known = len(admitted.token_ids) - 6
        assert known > 0 and admitted.num_prompt_tokens == 6
        assert admitted.token_ids.tolist() == [
            *requests[1].prompt_token_ids,
            *collected.tokens["b"][:known],
        ]
    assert collected.first_scheduled == ["a", "b"], "only the first admission counts"


def test_priority_decides_who_enters_and_who_is_preempted() -> None:
    core, _ = make_core(num_blocks=9, max_model_len=24, policy="priority", overlap=False)
    core.add_request(make_request("low", 8, priority=5, max_tokens=14))
    core.step()
    core.add_request(make_request("late", 4, priority=1, arrival_time=2.0, max_tokens=14))
    core.add_request(make_request("early", 4, priority=1, arrival_time=1.0, max_tokens=14))
    core.add_request(make_request("first", 4, priority=0, arrival_time=3.0, max_tokens=14))
    core.step()
    assert [r.request_id for r in core.scheduler.running] == ["low", "first", "early", "late"]
    victims: list[str] = []
    ended: list[str] = []
    while core.has_unfinished():
        preempted = {i: r.num_preemptions for i, r in core.scheduler.requests.items()}
        outputs = core.step()
        victims += [
            i
            for i, r in core.scheduler.requests.items()
            if r.num_preemptions > preempted[i] and i not in victims
        ]
        ended += [f.request_id for f in outputs.finished]
    assert victims[:2] == ["low", "late"]
    assert ended.index("first") == 0 and ended[-1] == "low"


def test_equal_priorities_are_served_in_order_of_arrival_time() -> None:
    core, _ = make_core(max_num_seqs=1, policy="priority")
    requests = [
        make_request("c", arrival_time=3.0, max_tokens=2),
        make_request("a", arrival_time=1.0, max_tokens=2),
        make_request("b", arrival_time=2.0, max_tokens=2),
        make_request("urgent", arrival_time=9.0, priority=-1, max_tokens=2),
    ]
    assert run(core, requests).first_scheduled == ["urgent", "a", "b", "c"]


def test_a_prompt_enters_only_when_it_fits_beside_the_running_ones() -> None:
    # Two prompts of six blocks, nine usable ones: chunks of both would preempt each other.
    core, executor = make_core(num_blocks=10, budget=16, threshold=4, max_model_len=28)
    collected = run(core, [make_request(name, 24, max_tokens=2) for name in "ab"])
    assert sum(o.stats.num_preemptions for o in collected.outputs if o.stats) == 0
    assert all(len(plan.rows) == 1 for plan in executor.plans)


def test_a_request_that_cannot_grow_alone_fails_loudly() -> None:
    core, _ = make_core(num_blocks=9, overlap=False)
    core.add_request(make_request("a", 4, max_tokens=20))
    core.step()
    core.scheduler.kv.pool.allocate(core.scheduler.kv.pool.num_free)
    collected = Collected()
    for _ in range(5):
        if core.has_unfinished():
            collected.add(core.step())
    reason, text = collected.ends["a"]
    assert reason is FinishReason.ERROR and "runs alone and still lacks 1 KV-cache blocks" in str(
        text
    )


@pytest.mark.parametrize("overlap", [True, False])
def test_stats_describe_the_step(overlap: bool) -> None:
    core, _ = make_core(num_blocks=9, max_num_seqs=2, overlap=overlap)
    collected = run(core, [make_request(name, 4, max_tokens=3) for name in "abc"])
    stats = [o.stats for o in collected.outputs if o.stats is not None]
    first = stats[0]
    assert (first.num_running, first.num_waiting, first.num_scheduled_tokens) == (2, 1, 8)
    assert first.kv_cache_usage == (4 / 8 if overlap else 2 / 8)
    assert (stats[-1].num_running, stats[-1].kv_cache_usage) == (0, 0.0)


def test_a_steady_decode_step_allocates_no_arrays_anew() -> None:
    """The executor and the frontend may rely on it to recognise an unchanged batch."""
    core, executor = make_core(max_num_seqs=3)
    for name in "abc":
        core.add_request(make_request(name, 4, max_tokens=12))
    outputs = [core.step() for _ in range(6)]
    assert executor.plans[3].rows is executor.plans[4].rows
    assert outputs[3].request_ids is outputs[4].request_ids == ["a", "b", "c"]
    assert all(r.state is RequestState.RUNNING for r in core.scheduler.running)
