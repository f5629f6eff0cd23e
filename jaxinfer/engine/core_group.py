"""Several engine cores behind one client: each request goes to one of them, each call to all."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

from jaxinfer.engine.errors import EngineDeadError
from jaxinfer.engine.load_balancer import LoadBalancer
from jaxinfer.engine.messages import EngineCoreOutputs, EngineCoreRequest
from jaxinfer.engine.process_client import ProcessClient

type ConnectCore = Callable[[Callable[[EngineCoreOutputs], None]], ProcessClient]
"""Makes a client that calls its argument with every step's outputs."""


class CoreGroup:
    """An `EngineCoreClient`. `on_outputs` is called with the outputs of all cores, which say whose they are, in threads of
    theirs. A core that has died gets no more requests; the others go on. None among `connects`: it isn't there yet."""

    def __init__(
        self,
        connects: Sequence[ConnectCore | None],
        balancer: LoadBalancer,
        on_outputs: Callable[[EngineCoreOutputs], None],
    ) -> None:
        self._balancer = balancer
        self._on_outputs = on_outputs
        self._lock = threading.Lock()
        self._core_of: dict[str, int] = {}
        self._clients = [
            None if connect is None else connect(partial(self._deliver, core))
            for core, connect in enumerate(connects)
        ]

    def add_request(self, request: EngineCoreRequest, core: int | None = None) -> int:
        with self._lock:
            if request.request_id in self._core_of:
                raise ValueError(f"request_id {request.request_id!r} is already in use.")
            if core is None:
                core = self._choose(request)
            self._client(core).add_request(request)
            self._core_of[request.request_id] = core
        return core

    def _choose(self, request: EngineCoreRequest) -> int:
        if len(self._clients) == 1:
            return 0
        live = enumerate(self._clients)
        loads = {core: c.load for core, c in live if c is not None and c.is_alive}
        if not loads:
            self.check_health()
            raise EngineDeadError("All engine cores have died.")
        return self._balancer.choose(request, loads)

    def abort_requests(self, request_ids: Iterable[str]) -> None:
        by_core: dict[int, list[str]] = {}
        with self._lock:
            for request_id in request_ids:
                core = self._core_of.pop(request_id, None)
                if core is not None:
                    by_core.setdefault(core, []).append(request_id)
        for core, ids in by_core.items():
            self._client(core).abort_requests(ids)

    def call(self, name: str, *arguments: Any, core: int | None = None) -> Future[Any]:
        """By all cores: its result is the first one's, or of yes and no whether one says yes; any error is the call's.
        Where some can't sleep, the others are woken up again."""
        if core is not None:
            return self._client(core).call(name, *arguments)
        clients = [self._client(core) for core in range(len(self._clients))]
        for client in clients:
            client.check_health()
        result: Future[Any] = Future()
        futures = [client.call(name, *arguments) for client in clients]
        waiting = set(futures)
        lock = threading.Lock()

        def settle(future: Future[Any]) -> None:
            with lock:
                waiting.discard(future)
                if waiting or result.done():
                    return
                errors = [error for f in futures if (error := f.exception()) is not None]
                if not errors:
                    values = [f.result() for f in futures]
                    is_bool = all(isinstance(value, bool) for value in values)
                    result.set_result(any(values) if is_bool else values[0])
                    return
                result.set_exception(errors[0])
            if name == "sleep":
                for client, f in zip(clients, futures, strict=True):
                    if f.exception() is None and client.is_alive:
                        client.call("wake_up", None)

        for future in futures:
            future.add_done_callback(settle)
        return result

    def has_unfinished(self) -> bool:
        return any(client is not None and client.has_unfinished() for client in self._clients)

    @property
    def num_unfinished(self) -> int:
        """At all cores, by whomever they were sent, as they last reported."""
        loads = [client.load for client in self._clients if client is not None and client.is_alive]
        return sum(load.num_running + load.num_waiting for load in loads)

    def check_health(self, core: int | None = None) -> None:
        for one in range(len(self._clients)) if core is None else (core,):
            self._client(one).check_health()

    def replace(self, core: int, connect: ConnectCore) -> None:
        """Go on with another core in the place of one that has died, or wasn't there yet."""
        if (old := self._clients[core]) is not None:
            old.shutdown()
        with self._lock:
            self._balancer.forget(core)
            self._clients[core] = connect(partial(self._deliver, core))

    def shutdown(self) -> None:
        clients = [client for client in self._clients if client is not None]
        with ThreadPoolExecutor(max(1, len(clients))) as pool:
            list(pool.map(ProcessClient.shutdown, clients))

    def _client(self, core: int) -> ProcessClient:
        client = self._clients[core]
        if client is None:
            raise EngineDeadError(f"The engine core {core} has died.")
        return client

    def _deliver(self, core: int, outputs: EngineCoreOutputs) -> None:
        outputs.core = core
        if outputs.finished:
            with self._lock:
                for end in outputs.finished:
                    self._core_of.pop(end.request_id, None)
        self._on_outputs(outputs)
