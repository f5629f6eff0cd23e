from __future__ import annotations

import queue
import threading

import pytest

from jaxinfer.engine.client import InprocClient, ThreadClient
from jaxinfer.engine.errors import EngineDeadError
from jaxinfer.engine.messages import EngineCoreOutputs, FinishReason
from tests.engine.core_runs import Collected, alone, make_core
from tests.engine.fake_executor import FakeExecutor
from tests.engine.fake_requests import make_request

LIMIT = 20.0
"""Seconds after which a test that waits for the other thread gives up."""


def test_inproc_steps_in_the_callers_thread() -> None:
    core, executor = make_core()
    client = InprocClient(core)
    requests = [make_request(name, 4, max_tokens=5) for name in "abc"]
    for request in requests:
        client.add_request(request)
    client.abort_requests(["b"])
    collected = Collected()
    while client.has_unfinished():
        collected.add(client.get_output())
    assert collected.tokens == {r.request_id: alone(r)[0] for r in (requests[0], requests[2])}
    client.shutdown()
    assert executor.shut_down


def start(
    **config: object,
) -> tuple[ThreadClient, FakeExecutor, queue.SimpleQueue[EngineCoreOutputs]]:
    core, executor = make_core(**config)  # type: ignore[arg-type]
    outputs: queue.SimpleQueue[EngineCoreOutputs] = queue.SimpleQueue()
    return ThreadClient(core, outputs.put), executor, outputs


def collect(outputs: queue.SimpleQueue[EngineCoreOutputs], num_ends: int) -> Collected:
    collected = Collected()
    while len(collected.ends) < num_ends:
        collected.add(outputs.get(timeout=LIMIT))
    return collected


def test_thread_serves_whoever_comes() -> None:
    client, executor, outputs = start(max_num_seqs=3)
    requests = [make_request(f"r{i}", 1 + i % 7, max_tokens=4 + i) for i in range(12)]
    adders = [
        threading.Thread(target=lambda part=part: [client.add_request(r) for r in part])
        for part in (requests[:6], requests[6:])
    ]
    for adder in adders:
        adder.start()
    collected = collect(outputs, 12)
    for request in requests:
        assert collected.tokens[request.request_id] == alone(request)[0]
    assert not client.has_unfinished()
    # It waits for more when there is nothing to do.
    client.add_request(requests[0])
    assert collect(outputs, 1).tokens["r0"] == alone(requests[0])[0]
    client.shutdown()
    assert executor.shut_down
    with pytest.raises(EngineDeadError):
        client.add_request(requests[0])


def test_thread_refuses_bad_requests_in_the_callers_thread() -> None:
    client, _, _ = start()
    with pytest.raises(ValueError, match="prompt_token_ids of request 'a' is empty"):
        client.add_request(make_request("a", []))
    assert not client.has_unfinished()
    client.add_request(make_request("a", max_tokens=20))
    client.shutdown()


def test_thread_refuses_an_id_in_use_and_takes_it_again_after_an_abort() -> None:
    gate = threading.Event()
    arrived = threading.Event()

    class Gated(FakeExecutor):
        def execute_model(self, plan: object) -> None:
            arrived.set()
            assert gate.wait(LIMIT)
            super().execute_model(plan)  # type: ignore[arg-type]

    core, executor = make_core()
    executor.__class__ = Gated
    outputs: queue.SimpleQueue[EngineCoreOutputs] = queue.SimpleQueue()
    client = ThreadClient(core, outputs.put)
    first, second = make_request("a", [1] * 4, max_tokens=20), make_request("a", [2], max_tokens=3)
    client.add_request(first)
    assert arrived.wait(LIMIT)
    with pytest.raises(ValueError, match="'a' is already in use"):
        client.add_request(second)
    client.abort_requests(["a", "unknown"])
    assert not client.has_unfinished()
    client.add_request(second)
    gate.set()
    collected = collect(outputs, 1)
    assert collected.tokens["a"] == alone(second)[0]
    client.shutdown()


def test_thread_reports_a_failing_step_and_then_refuses() -> None:
    client, executor, outputs = start(max_num_seqs=1)
    executor.is_invalid = lambda context: 1 // 0 == 0
    client.add_request(make_request("a", max_tokens=3))
    reason, text = collect(outputs, 1).ends["a"]
    assert reason is FinishReason.ERROR and "ZeroDivisionError" in str(text)
    with pytest.raises(EngineDeadError, match="ZeroDivisionError"):
        client.add_request(make_request("b", max_tokens=3))
    client.shutdown()


def test_thread_ends_with_its_listener() -> None:
    core, _ = make_core()
    seen: queue.SimpleQueue[EngineCoreOutputs] = queue.SimpleQueue()
    failed = False

    def listen(outputs: EngineCoreOutputs) -> None:
        nonlocal failed
        if not failed:
            failed = True
            raise RuntimeError("nobody listens")
        seen.put(outputs)

    client = ThreadClient(core, listen)
    client.add_request(make_request("a", max_tokens=9))
    assert collect(seen, 1).ends["a"] == (FinishReason.ERROR, "RuntimeError: nobody listens")
    with pytest.raises(EngineDeadError):
        client.add_request(make_request("b", max_tokens=3))
    client.shutdown()


def test_a_thread_answers_calls_between_steps_and_none_after_its_end() -> None:
    client, executor, outputs = start()
    client.add_request(request := make_request("a", 4, max_tokens=20))
    with pytest.raises(ValueError, match="1 requests are unfinished"):
        client.call("sleep", 1).result(LIMIT)
    assert collect(outputs, 1).tokens["a"] == alone(request)[0]
    client.call("sleep", 1).result(LIMIT)
    with pytest.raises(ValueError, match="sleeps"):
        client.add_request(make_request("b"))
    client.call("wake_up", None).result(LIMIT)
    assert executor.log[-2:] == ["sleep 1", "wake up kv_cache weights"]
    client.add_request(request)
    assert collect(outputs, 1).tokens["a"] == alone(request)[0]
    client.shutdown()
    with pytest.raises(EngineDeadError):
        client.call("is_sleeping")
