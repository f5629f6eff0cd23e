"""Two cores in processes of their own behind one client."""

from __future__ import annotations

import os
import queue
import signal
import sys
from collections import Counter
from functools import partial

import pytest

from jaxinfer.engine.core_group import CoreGroup
from jaxinfer.engine.core_handle import CoreProcess
from jaxinfer.engine.errors import EngineDeadError
from jaxinfer.engine.load_balancer import LoadBalancer
from jaxinfer.engine.messages import EngineCoreOutputs, FinishReason
from jaxinfer.engine.process_client import ProcessClient
from jaxinfer.engine_args import EngineArgs
from tests.engine.core_runs import alone
from tests.engine.fake_requests import BLOCK_SIZE, make_request
from tests.engine.test_process_client import LIMIT, MAIN, collect


class Group:
    """A `CoreGroup` over fake cores, its processes, and what comes out of it."""

    def __init__(self, kind: str, routing: str = "load", **args) -> None:
        command = [sys.executable, str(MAIN), kind]
        self.start = partial(CoreProcess, command, EngineArgs("fake", max_num_seqs=4, **args))
        self.processes = [self.start(), self.start()]
        self.ready = [process.wait_ready() for process in self.processes]
        self.outputs: queue.SimpleQueue[EngineCoreOutputs] = queue.SimpleQueue()
        connects = [
            partial(ProcessClient, process, ready)
            for process, ready in zip(self.processes, self.ready, strict=True)
        ]
        balancer = LoadBalancer(routing, BLOCK_SIZE, 4)
        self.client = CoreGroup(connects, balancer, self.outputs.put)

    def __enter__(self) -> Group:
        return self

    def __exit__(self, *_) -> None:
        self.client.shutdown()


def test_requests_calls_and_aborts_reach_their_cores():
    with Group("hash") as group:
        client = group.client
        requests = [make_request(f"r{i}", i + 1, max_tokens=3 + i % 5) for i in range(16)]
        cores = {r.request_id: client.add_request(r) for r in requests}
        counts = Counter(cores.values())
        assert min(counts[0], counts[1]) >= 4
        collected = collect(group.outputs, len(requests))
        for request in requests:
            assert (collected.tokens[request.request_id], collected.ends[request.request_id]) == (
                alone(request)
            )
        for outputs in collected.outputs:
            assert {cores[i] for i in outputs.request_ids} <= {outputs.core}
        assert not client.has_unfinished()

        # The samples of a prompt go where it was computed.
        first = client.add_request(make_request("s/0", 3, max_tokens=2))
        assert client.add_request(make_request("s/1", 3, max_tokens=2), first) == first
        collect(group.outputs, 2)

        prompt = [7] * 17
        for core in (0, 1, 0, 1):
            client.add_request(make_request(f"p{core}", prompt, max_tokens=2), core)
            hits = sum(
                o.stats.prefix_cache_hits for o in collect(group.outputs, 1).outputs if o.stats
            )
        assert hits == 16
        assert client.call("reset_prefix_cache").result(LIMIT) is None
        for core in (0, 1):
            client.add_request(make_request(f"q{core}", prompt, max_tokens=2), core)
            stats = [o.stats for o in collect(group.outputs, 1).outputs if o.stats]
            assert sum(s.prefix_cache_hits for s in stats) == 0

        client.call("sleep", 1).result(LIMIT)
        assert client.call("is_sleeping").result(LIMIT) is True
        client.call("wake_up", None).result(LIMIT)
        assert client.call("is_sleeping").result(LIMIT) is False
        with pytest.raises(ValueError, match="level must be 1 or 2"):
            client.call("sleep", 3).result(LIMIT)


def test_who_can_sleep_is_woken_up_where_another_can_not():
    with Group("slow", max_model_len=1500) as group:
        group.client.add_request(make_request("a", 3, max_tokens=1400), 0)
        with pytest.raises(ValueError, match="'a' is already in use"):
            group.client.add_request(make_request("a"))
        with pytest.raises(ValueError, match="1 requests are unfinished"):
            group.client.call("sleep", 1).result(LIMIT)
        assert group.client.call("is_sleeping").result(LIMIT) is False
        group.client.abort_requests(["a", "unknown"])
        assert not group.client.has_unfinished()
        group.client.call("sleep", 1).result(LIMIT)
        assert group.client.call("is_sleeping").result(LIMIT) is True


def test_one_core_dies_and_another_takes_its_place():
    with Group("slow", max_model_len=1500) as group:
        client = group.client
        for i in range(6):
            client.add_request(make_request(str(i), 3, max_tokens=1400), i % 2)
        os.kill(group.processes[1].pid, signal.SIGKILL)
        collected = collect(group.outputs, 3)
        assert sorted(collected.ends) == ["1", "3", "5"]
        for reason, text in collected.ends.values():
            assert reason is FinishReason.ERROR and "killed by signal 9" in str(text)
        client.check_health(0)
        for core in (None, 1):
            with pytest.raises(EngineDeadError, match="killed by signal 9"):
                client.check_health(core)
        with pytest.raises(EngineDeadError):
            client.call("reset_prefix_cache")
        assert [
            client.add_request(make_request(f"late{i}", 3, max_tokens=1400)) for i in range(3)
        ] == [0, 0, 0]
        assert client.has_unfinished()

        process = group.start()
        client.replace(1, partial(ProcessClient, process, process.wait_ready()))
        client.check_health()
        assert client.add_request(make_request("new", 3, max_tokens=2)) == 1
        while "new" not in collected.ends:
            collected.add(group.outputs.get(timeout=LIMIT))
        assert collected.ends["new"][0] is FinishReason.LENGTH
        # What runs on the other core was never disturbed.
        assert not {"0", "2", "4"} & set(collected.ends) and len(collected.tokens["0"]) > 1

        for one in (group.processes[0], process):
            os.kill(one.pid, signal.SIGKILL)
        collect(group.outputs, 6)
        with pytest.raises(EngineDeadError):
            while True:  # the second one's death may be still on its way
                client.add_request(make_request("nobody", 3))
                client.abort_requests(["nobody"])
