"""The engine core in another process: the same tokens, and an end that is noticed."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from jaxinfer.engine.core_handle import CoreProcess
from jaxinfer.engine.errors import EngineDeadError
from jaxinfer.engine.ipc import (
    Add,
    Attach,
    Beat,
    Call,
    FromCore,
    Outputs,
    Pause,
    Ready,
    Returned,
    Start,
    ToCore,
)
from jaxinfer.engine.messages import (
    Admission,
    EngineCoreOutputs,
    FinishedRequest,
    FinishReason,
    TokenLogprobs,
)
from jaxinfer.engine.process_client import ProcessClient
from jaxinfer.engine.stats import DeviceMemory, HostSeconds, SchedulerStats, StepWork
from jaxinfer.engine_args import EngineArgs
from tests.engine.core_runs import Collected, alone
from tests.engine.fake_requests import make_config, make_request

LIMIT = 30.0
"""Seconds after which a test that waits for the other process gives up."""
MAIN = Path(__file__).with_name("fake_core_main.py")


def command(kind: str) -> list[str]:
    return [sys.executable, str(MAIN), kind]


@pytest.fixture(scope="module")
def core() -> Iterator[tuple[ProcessClient, queue.SimpleQueue[EngineCoreOutputs], CoreProcess]]:
    """One process for all tests that leave it alive."""
    process = CoreProcess(command("hash"), EngineArgs("fake", max_num_seqs=3))
    outputs: queue.SimpleQueue[EngineCoreOutputs] = queue.SimpleQueue()
    ready = process.wait_ready()
    assert ready.num_blocks == 400 and ready.config == make_config(max_num_seqs=3, budget=32)
    client = ProcessClient(process, ready, outputs.put)
    yield client, outputs, process
    client.shutdown()
    assert not process_exists(process.pid)
    with pytest.raises(EngineDeadError, match="shut down"):
        client.add_request(make_request("late"))


def process_exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def collect(outputs: queue.SimpleQueue[EngineCoreOutputs], num_ends: int) -> Collected:
    collected = Collected()
    while len(collected.ends) < num_ends:
        collected.add(outputs.get(timeout=LIMIT))
    return collected


def test_tokens_and_ends_are_those_of_a_core_in_this_process(core):
    client, outputs, _ = core
    requests = [
        make_request(f"r{i}", i + 1, max_tokens=3 + i, stop_token_ids=[i], logit_bias={i: 0.5})
        for i in range(12)
    ]
    for request in requests:
        client.add_request(request)
    collected = collect(outputs, len(requests))
    for request in requests:
        expected_tokens, expected_end = alone(request)
        assert collected.tokens[request.request_id] == expected_tokens
        assert collected.ends[request.request_id] == expected_end
    assert not client.has_unfinished()
    stats = collected.outputs[-1].stats
    assert stats is not None and (stats.num_running, stats.kv_cache_usage) == (0, 0)
    # A batch that stays the same keeps its list, which spares the reader the lookups.
    lists = {id(o.request_ids) for o in collected.outputs if o.request_ids}
    assert len(lists) < sum(1 for o in collected.outputs if o.request_ids)


def test_aborts_arrive_and_ids_are_free_again(core):
    client, outputs, _ = core
    client.add_request(make_request("a", max_tokens=25))
    with pytest.raises(ValueError, match="'a' is already in use"):
        client.add_request(make_request("a"))
    with pytest.raises(ValueError, match="prompt_token_ids"):
        client.add_request(make_request("b", []))
    client.abort_requests(["a", "unknown"])
    assert not client.has_unfinished()
    second = make_request("c", max_tokens=2)
    client.add_request(second)
    collected = Collected()
    while "c" not in collected.ends:
        collected.add(outputs.get(timeout=LIMIT))
    assert collected.tokens["c"] == alone(second)[0]
    client.check_health()


def test_cached_prefixes_are_found_and_forgotten(core):
    client, outputs, _ = core
    prompt = [7] * 17

    def num_hits(request_id: str) -> int:
        client.add_request(make_request(request_id, prompt, max_tokens=2))
        stats = [o.stats for o in collect(outputs, 1).outputs if o.stats is not None]
        return sum(found.prefix_cache_hits for found in stats)

    assert [num_hits("x"), num_hits("y")] == [0, 16]
    assert client.call("reset_prefix_cache").result(LIMIT) is None
    assert num_hits("z") == 0


def test_calls_and_what_they_raise(core):
    client, outputs, _ = core
    client.call("sleep", 2).result(LIMIT)
    assert client.call("is_sleeping").result(LIMIT) is True
    client.call("wake_up", ["weights"]).result(LIMIT)
    assert client.call("is_sleeping").result(LIMIT) is True
    client.call("wake_up", None).result(LIMIT)
    assert client.call("is_sleeping").result(LIMIT) is False
    for name, arguments, reason in (
        ("sleep", (3,), "level must be 1 or 2"),
        ("wake_up", (["all"],), "tags may hold"),
        ("step", (), "no call 'step'"),
    ):
        with pytest.raises(ValueError, match=reason):
            client.call(name, *arguments).result(LIMIT)
    client.add_request(request := make_request("awake", 4, max_tokens=3))
    assert collect(outputs, 1).tokens["awake"] == alone(request)[0]


def test_a_killed_core_ends_every_request_within_two_seconds():
    process = CoreProcess(command("slow"), EngineArgs("fake", max_model_len=1500))
    outputs: queue.SimpleQueue[EngineCoreOutputs] = queue.SimpleQueue()
    client = ProcessClient(process, process.wait_ready(), outputs.put)
    for i in range(6):
        client.add_request(make_request(str(i), 3))
    outputs.get(timeout=LIMIT)
    start = time.monotonic()
    os.kill(process.pid, signal.SIGKILL)
    ends = collect(outputs, 6).ends
    assert time.monotonic() - start < 2
    for reason, text in ends.values():
        assert reason is FinishReason.ERROR and "killed by signal 9" in str(text)
    for call in (client.check_health, lambda: client.add_request(make_request("late"))):
        with pytest.raises(EngineDeadError, match="killed by signal 9"):
            call()
    assert not client.has_unfinished()
    client.abort_requests(["0"])
    client.shutdown()


def test_a_failing_step_is_told_and_ends_the_process():
    process = CoreProcess(command("break"), EngineArgs("fake"))
    outputs: queue.SimpleQueue[EngineCoreOutputs] = queue.SimpleQueue()
    client = ProcessClient(process, process.wait_ready(), outputs.put)
    client.add_request(make_request("a"))
    reason, text = collect(outputs, 1).ends["a"]
    assert reason is FinishReason.ERROR and "ZeroDivisionError" in str(text)
    client._thread.join(LIMIT)
    with pytest.raises(EngineDeadError, match="ZeroDivisionError"):
        client.check_health()
    client.shutdown()


@pytest.mark.parametrize("how", ["step", "stopped", "idle"])
def test_a_hanging_core_is_noticed_and_killed(how):
    kind = "hang" if how == "step" else "slow"
    args = EngineArgs("fake", max_model_len=1500)
    process = CoreProcess(command(kind), args, heartbeat_timeout=0.5)
    outputs: queue.SimpleQueue[EngineCoreOutputs] = queue.SimpleQueue()
    deaths: queue.SimpleQueue[str] = queue.SimpleQueue()
    client = ProcessClient(process, process.wait_ready(), outputs.put, on_death=deaths.put)
    if how != "idle":
        client.add_request(make_request("a", 3, max_tokens=1400))
    if how == "stopped":
        outputs.get(timeout=LIMIT)
    if how != "step":
        client.check_health()
        os.kill(process.pid, signal.SIGSTOP)
    assert "no sign of life for 0.5 s" in deaths.get(timeout=LIMIT)
    if how != "idle":
        reason, text = collect(outputs, 1).ends["a"]
        assert reason is FinishReason.ERROR and "no sign of life for 0.5 s" in str(text)
    with pytest.raises(EngineDeadError, match="no sign of life"):
        client.check_health()
    client.shutdown()
    assert not process_exists(process.pid)


@pytest.mark.parametrize(("kind", "timeout"), [("compile", 0.4), ("hash", 0.4), ("hash", 0)])
def test_who_compiles_or_has_nothing_to_do_is_not_taken_for_hanging(kind, timeout):
    process = CoreProcess(command(kind), EngineArgs("fake"), heartbeat_timeout=timeout)
    outputs: queue.SimpleQueue[EngineCoreOutputs] = queue.SimpleQueue()
    client = ProcessClient(process, process.wait_ready(), outputs.put)
    with pytest.raises(queue.Empty):  # twice as long as it may be silent
        outputs.get(timeout=2 * timeout + 0.01)
    client.add_request(request := make_request("a", 3, max_tokens=2))
    assert collect(outputs, 1).tokens["a"] == alone(request)[0]
    client.check_health()
    client.shutdown()


@pytest.mark.parametrize(
    ("kind", "error", "text"),
    [
        ("refuse", ValueError, "^model: there is no nothing.$"),
        ("fail", EngineDeadError, "RuntimeError: no device"),
        ("exit", EngineDeadError, r"exited \(7\)"),
    ],
)
def test_a_core_that_cannot_start_says_why(kind, error, text):
    process = CoreProcess(command(kind), EngineArgs("nothing"))
    with pytest.raises(error, match=text):
        process.wait_ready()
    assert not process_exists(process.pid)
    process.close()


def test_the_core_ends_with_its_parent():
    code = (
        "import sys, os\n"
        "from jaxinfer.engine_args import EngineArgs\n"
        "from jaxinfer.engine.core_handle import CoreProcess\n"
        "core = CoreProcess(sys.argv[1:], EngineArgs('fake'))\n"
        "core.wait_ready()\n"
        "print(core.pid, flush=True)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *command("hash")],
        cwd=MAIN.parents[2],
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )
    pid = int(done.stdout)
    end = time.monotonic() + LIMIT
    while process_exists(pid):
        assert time.monotonic() < end


def test_messages_survive_the_wire():
    request = make_request("a", 3, logit_bias={3: 1.5}, stop=["x"], seed=7, bad_words=["y"])
    outputs = EngineCoreOutputs(
        ["a"],
        [5],
        [1],
        {0: TokenLogprobs([5, 6], [-0.5, -1.0], 1)},
        {"a": [TokenLogprobs([1], [-2.0], 4)]},
        [FinishedRequest("a", FinishReason.STOP, 5)],
        [Admission("a", 1.5)],
        2.5,
        SchedulerStats(
            num_running=1,
            kv_cache_usage=0.5,
            num_preemptions=4,
            num_compilations=5,
            work=StepWork(1.5, 2.0, 3.0, 0.25),
            seconds=HostSeconds(0.1, 0.2, 0.3, 0.4),
            memory=DeviceMemory(3, 4),
        ),
    )
    args = EngineArgs("m", hf_overrides={"a": [1, {"b": None}]}, max_num_seqs=3)
    for kind, message in (
        (ToCore, Start(args)),
        (ToCore, Add(request)),
        (ToCore, Call(3, "sleep", [1])),
        (FromCore, Returned(3, None, "text")),
        (FromCore, Ready(make_config(), 9)),
        (FromCore, Outputs(outputs, same_ids=True)),
        (ToCore, Attach(2, "ipc://x")),
        (FromCore, Beat(1, 2, 0.5, 3)),
        (FromCore, Pause()),
    ):
        data = msgspec.msgpack.encode(message)
        assert msgspec.msgpack.decode(data, type=kind) == message
