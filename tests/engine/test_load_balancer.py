"""Where requests go: to the least load, or to the core that knows their beginning."""

from __future__ import annotations

from collections import Counter

import pytest

from jaxinfer.engine import load_balancer
from jaxinfer.engine.ipc import Beat
from jaxinfer.engine.load_balancer import OVERLOAD_FACTOR, OVERLOAD_SLACK, LoadBalancer
from tests.engine.fake_requests import BLOCK_SIZE, make_request

IDLE = Beat()


def balancer(routing: str = "load", max_num_seqs: int = 16) -> LoadBalancer:
    return LoadBalancer(routing, BLOCK_SIZE, max_num_seqs)


def test_idle_cores_take_turns():
    chooser = balancer()
    loads = {0: IDLE, 1: IDLE, 2: IDLE}
    assert [chooser.choose(make_request("a"), loads) for _ in range(6)] == [0, 1, 2, 0, 1, 2]
    del loads[1]
    assert Counter(chooser.choose(make_request("a"), loads) for _ in range(6)) == {0: 3, 2: 3}


@pytest.mark.parametrize(
    ("busy", "busier"),
    [
        (Beat(num_running=3), Beat(num_running=4)),
        (Beat(num_running=3), Beat(num_waiting=1)),
        (Beat(num_running=5), Beat(num_running=0, num_waiting=2)),
        # A cache that is nearly full outweighs ten short requests.
        (Beat(num_running=10, kv_cache_usage=0.1), Beat(num_running=1, kv_cache_usage=0.95)),
    ],
)
def test_the_least_load_wins_wherever_it_is(busy, busier):
    chooser = balancer()
    for _ in range(3):
        assert chooser.choose(make_request("a"), {0: busy, 1: busier}) == 0
        assert chooser.choose(make_request("a"), {0: busier, 1: busy}) == 1


def test_a_beginning_goes_where_it_was_last():
    chooser = balancer("prefix")
    loads = {0: IDLE, 1: IDLE}
    system = list(range(BLOCK_SIZE))
    first = chooser.choose(make_request("a", [*system, *[7] * BLOCK_SIZE, 1, 2]), loads)
    other = chooser.choose(make_request("b", [9] * BLOCK_SIZE), loads)
    assert {first, other} == {0, 1}
    busy = loads | {first: Beat(num_running=OVERLOAD_SLACK)}
    # Of two blocks, and of one.
    assert chooser.choose(make_request("c", [*system, *[7] * BLOCK_SIZE, 5]), busy) == first
    assert chooser.choose(make_request("d", [*system, *[8] * BLOCK_SIZE]), busy) == first
    assert chooser.choose(make_request("e", [9] * (4 * BLOCK_SIZE)), busy) == other
    # A beginning shorter than a block, and one of another salt, are nobody's.
    assert chooser.choose(make_request("f", system[:-1]), busy) == other
    assert chooser.choose(make_request("g", system, salt="s"), busy) == other
    chooser.forget(first)
    assert chooser.choose(make_request("h", system), busy) == other


def test_the_longest_known_beginning_decides():
    chooser = balancer("prefix")
    long = [*range(2 * BLOCK_SIZE)]
    assert chooser.choose(make_request("a", long), {0: IDLE}) == 0
    assert chooser.choose(make_request("b", long[:BLOCK_SIZE]), {1: IDLE}) == 1
    loads = {0: IDLE, 1: IDLE}
    assert chooser.choose(make_request("c", [*long, 3]), loads) == 0
    # Now its first block is there, too.
    assert chooser.choose(make_request("d", long[:BLOCK_SIZE]), loads) == 0


def test_an_overloaded_or_dead_core_is_passed_over():
    chooser = balancer("prefix")
    prompt = [3] * BLOCK_SIZE
    assert chooser.choose(make_request("a", prompt), {0: IDLE}) == 0
    least = Beat(num_running=5)
    limit = OVERLOAD_FACTOR * 5 + OVERLOAD_SLACK
    assert chooser.choose(make_request("b", prompt), {0: Beat(limit), 1: least}) == 0
    assert chooser.choose(make_request("c", prompt), {0: Beat(limit + 1), 1: least}) == 1
    assert chooser.choose(make_request("d", prompt), {0: Beat(limit), 1: least}) == 1
    assert chooser.choose(make_request("e", prompt), {0: IDLE}) == 0


def test_only_so_many_beginnings_are_remembered(monkeypatch):
    monkeypatch.setattr(load_balancer, "_MAX_PREFIXES", 2)
    chooser = balancer("prefix")
    for token in (1, 2, 1, 3):
        chooser.choose(make_request("a", [token] * BLOCK_SIZE), {0: IDLE})
    busy = {0: Beat(num_running=1), 1: IDLE}
    assert [chooser.choose(make_request("b", [t] * BLOCK_SIZE), busy) for t in (1, 3)] == [0, 0]
    assert chooser.choose(make_request("b", [2] * BLOCK_SIZE), busy) == 1
