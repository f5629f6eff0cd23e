from __future__ import annotations

import random

import pytest

from jaxinfer.config import ModelConfig
from jaxinfer.engine.admission_order import WINDOW, CacheAwareOrder, QueueOrder
from jaxinfer.engine.request import Request
from jaxinfer.engine.request_queue import RequestQueue, create_request_queue
from tests.engine.core_runs import make_core, run
from tests.engine.fake_requests import make_request

MODEL = ModelConfig("fake", "fake", "float32", 4096, 50)


def queue_of(
    lengths: list[int], policy: str = "fcfs", priorities: list[int] | None = None
) -> tuple[RequestQueue, dict[Request, int]]:
    """A queue, and the cached prefix of each of its requests."""
    queue = create_request_queue(policy)  # type: ignore[arg-type]
    cached = {}
    for i, length in enumerate(lengths):
        priority = priorities[i] if priorities else 0
        request = Request(make_request(str(i), 3, priority=priority), MODEL, i)
        queue.add(request)
        cached[request] = length
    return queue, cached


def names(queue: RequestQueue) -> list[str]:
    return [request.request_id for request in queue]


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_who_is_passed_over_keeps_its_place(policy: str) -> None:
    queue, _ = queue_of([0] * 5, policy)
    order = QueueOrder(queue)
    asked = []
    while (request := order.next()) is not None:
        asked.append(request.request_id)
        if request.request_id in "13":
            order.take(request)
    order.close()
    assert asked == ["0", "1", "2", "3", "4"] and names(queue) == ["0", "2", "4"]


def test_a_step_passes_over_no_more_than_the_window() -> None:
    queue, _ = queue_of([0] * (WINDOW + 9))
    order = QueueOrder(queue)
    assert sum(order.next() is not None for _ in range(WINDOW + 9)) == WINDOW
    order.close()
    assert names(queue) == [str(i) for i in range(WINDOW + 9)]


def test_longest_prefix_first_and_the_order_of_the_queue_among_equals() -> None:
    queue, cached = queue_of([0, 4, 8, 4, 8])
    order = CacheAwareOrder(queue, cached.__getitem__, 100)
    asked = []
    while (request := order.next()) is not None:
        asked.append(request.request_id)
        if request.request_id != "3":
            order.take(request)
    order.close()
    assert asked == ["2", "4", "1", "3", "0"] and names(queue) == ["3"]


def test_priority_comes_before_the_cache_where_it_counts() -> None:
    queue, cached = queue_of([0, 9, 1, 5], "fcfs", [0, 1, 0, 1])
    first = CacheAwareOrder(queue, cached.__getitem__, 100).next()
    assert first is not None and first.request_id == "1"
    queue, cached = queue_of([0, 9, 1, 5], "priority", [0, 1, 0, 1])
    order = CacheAwareOrder(queue, cached.__getitem__, 100)
    first, second = order.next(), order.next()
    assert first is not None and second is not None and order.next() is None
    assert [first.request_id, second.request_id] == ["2", "0"]
    order.close()
    assert names(queue) == ["0", "2", "1", "3"]


@pytest.mark.parametrize("limit", [0, 1, 5])
def test_nobody_is_overtaken_more_often_than_the_limit(limit: int) -> None:
    """Against a count from outside; new requests with long prefixes keep coming."""
    rng = random.Random(limit)
    queue, cached = queue_of([0] * 3)
    overtaken = dict.fromkeys(cached, 0)
    num_arrived = 3
    while len(queue):
        order = CacheAwareOrder(queue, cached.__getitem__, limit)
        waiting = sorted(overtaken, key=lambda r: r.arrival_index)
        for _ in range(rng.randint(1, 3)):
            request = order.next()
            if request is None:
                break
            if rng.random() < 0.2:
                continue
            order.take(request)
            for other in waiting[: waiting.index(request)]:
                overtaken[other] += 1
                assert overtaken[other] <= limit
            waiting.remove(request)
            del overtaken[request]
        order.close()
        while num_arrived < 200 and rng.random() < 0.7:
            request = Request(make_request(str(num_arrived), 3), MODEL, num_arrived)
            cached[request] = rng.randint(0, 9)
            overtaken[request] = 0
            queue.add(request)
            num_arrived += 1
    assert not overtaken


def test_requests_of_two_prompts_come_in_turns_only_without_it() -> None:
    """A cache that holds one of two long prefixes: in the order of arrival, each evicts the other's."""
    rng = random.Random(1)
    prefixes = [[rng.randrange(50) for _ in range(16)] for _ in range(2)]

    def tokens_computed(cache_aware: bool) -> int:
        core, executor = make_core(
            9, max_num_seqs=1, max_model_len=24, budget=32, cache_aware=cache_aware
        )
        requests = [
            make_request(str(i), [*prefixes[i % 2], i, i, i, i, i], max_tokens=3) for i in range(12)
        ]
        ends = run(core, requests).ends
        assert len(ends) == 12
        return sum(plan.num_tokens for plan in executor.plans)

    assert tokens_computed(True) < 0.65 * tokens_computed(False)
