from __future__ import annotations

from jaxinfer.config import ModelConfig
from jaxinfer.engine.request import Request
from jaxinfer.engine.request_queue import create_request_queue
from tests.engine.fake_requests import make_request


def requests(*specs: tuple[str, int, float]) -> list[Request]:
    """(id, priority, arrival time), arriving in this order."""
    model = ModelConfig("fake", "fake", "float32", 32, 50)
    return [
        Request(make_request(name, priority=priority, arrival_time=arrival), model, index)
        for index, (name, priority, arrival) in enumerate(specs)
    ]


def names(items: object) -> str:
    return "".join(request.request_id for request in items)  # type: ignore[attr-defined]


def test_first_come_first_served_ignores_clocks_and_priorities() -> None:
    queue = create_request_queue("fcfs")
    a, b, c, d = requests(("a", 9, 3.0), ("b", 0, 2.0), ("c", 5, 1.0), ("d", 1, 0.0))
    for request in (b, c, d):
        queue.add(request)
    queue.put_back(a)
    assert names(queue) == "abcd" and queue.peek() is a and len(queue) == 4
    queue.remove({c, a})
    assert [queue.pop(), queue.pop()] == [b, d] and not len(queue)
    assert queue.victim([b, a, c]) is c


def test_priority_then_arrival_time_then_order() -> None:
    queue = create_request_queue("priority")
    all_of_them = requests(
        ("a", 1, 5.0), ("b", 0, 9.0), ("c", 1, 4.0), ("d", 1, 5.0), ("e", -2, 8.0)
    )
    for request in all_of_them[1:]:
        queue.add(request)
    queue.put_back(all_of_them[0])
    assert names(queue) == "ebcad"
    queue.remove({all_of_them[2]})
    assert queue.peek().request_id == "e"
    assert names(queue.pop() for _ in range(4)) == "ebad"
    assert names([queue.victim(all_of_them), queue.victim(all_of_them[:3])]) == "da"


def test_who_is_put_back_stands_where_it_stood() -> None:
    queue = create_request_queue("fcfs")
    all_of_them = requests(*((name, 0, 0.0) for name in "abcde"))
    for i in (1, 4):
        queue.add(all_of_them[i])
    for i in (2, 3, 0):
        queue.put_back(all_of_them[i])
    assert names(queue) == "abcde"
    a, b, c, *_ = all_of_them
    assert queue.victim([b, c, a]) is c, "the latest arrival, whenever it was admitted"
