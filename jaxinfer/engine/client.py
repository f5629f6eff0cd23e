"""How the frontend reaches the engine core: in its own thread, or in another one of the same process.

Only plain messages cross (`messages.py`), so that a core in another process can stand behind the same interface.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any, Protocol

from jaxinfer.engine.core import EngineCore
from jaxinfer.engine.errors import EngineDeadError
from jaxinfer.engine.messages import (
    EngineCoreOutputs,
    EngineCoreRequest,
    FinishedRequest,
    FinishReason,
)

logger = logging.getLogger(__name__)


class EngineCoreClient(Protocol):
    """What every client can do. Request ids are the caller's to keep unique among unfinished requests."""

    def add_request(self, request: EngineCoreRequest, core: int | None = None) -> int:
        """Hand a request over, to the core of this number or one of the client's choice; returns which. Raises
        `ValueError` when the core can't serve it or knows its id already, and `EngineDeadError` when it has failed."""
        ...

    def abort_requests(self, request_ids: Iterable[str]) -> None:
        """End requests, wherever they are; ids that are unknown or finished are ignored. Nothing more is reported
        of them, but outputs that are already under way may still name them."""
        ...

    def call(self, name: str, *arguments: Any, core: int | None = None) -> Future[Any]:
        """`EngineCore.call` between two steps, of the core of this number or of all; the future holds its result or what
        it raised."""
        ...

    def has_unfinished(self) -> bool:
        """Whether outputs are still to come."""
        ...

    def check_health(self, core: int | None = None) -> None:
        """Raises `EngineDeadError` when the core of this number has failed, or any."""
        ...

    def shutdown(self) -> None:
        """Stop the core and release the device. Unfinished requests are dropped."""
        ...


@dataclass(frozen=True, slots=True)
class _Call:
    future: Future[Any]
    name: str
    arguments: tuple[Any, ...]


def _settle(future: Future[Any], core: EngineCore, name: str, arguments: Iterable[Any]) -> None:
    try:
        future.set_result(core.call(name, *arguments))
    except Exception as error:
        future.set_exception(error)


class InprocClient:
    """The core in the caller's thread: `get_output` runs one step."""

    def __init__(self, core: EngineCore) -> None:
        self._core = core

    def add_request(self, request: EngineCoreRequest, core: int | None = None) -> int:
        self._core.add_request(request)
        return 0

    def abort_requests(self, request_ids: Iterable[str]) -> None:
        self._core.abort_requests(request_ids)

    def call(self, name: str, *arguments: Any, core: int | None = None) -> Future[Any]:
        future: Future[Any] = Future()
        _settle(future, self._core, name, arguments)
        return future

    def get_output(self) -> EngineCoreOutputs:
        """Run a step and return what came of it: nothing where a step has only been launched so far. A step that
        fails ends all requests with an error in the outputs; the call after it raises `EngineDeadError`."""
        return self._core.step()

    def has_unfinished(self) -> bool:
        return self._core.has_unfinished()

    def check_health(self, core: int | None = None) -> None:
        self._core.check_alive()

    def shutdown(self) -> None:
        self._core.shutdown()


class ThreadClient:
    """The core in a thread of its own, which steps as long as there are requests.

    `on_outputs` is called in that thread with every step's outputs that are not empty; it must not block (an asyncio
    frontend passes them on with `loop.call_soon_threadsafe`). When a step fails, the last outputs end every request
    with an error, and `add_request` raises from then on.
    """

    def __init__(self, core: EngineCore, on_outputs: Callable[[EngineCoreOutputs], None]) -> None:
        self._core = core
        self._on_outputs = on_outputs
        self._inbox: SimpleQueue[EngineCoreRequest | list[str] | _Call | None] = SimpleQueue()
        self._unfinished: set[str] = set()
        self._lock = threading.Lock()
        self._dead: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="jaxinfer-engine-core", daemon=True)
        self._thread.start()

    def add_request(self, request: EngineCoreRequest, core: int | None = None) -> int:
        self._core.check_request(request)
        with self._lock:
            self._check_thread()
            if request.request_id in self._unfinished:
                raise ValueError(f"request_id {request.request_id!r} is already in use.")
            self._unfinished.add(request.request_id)
            self._inbox.put(request)
        return 0

    def abort_requests(self, request_ids: Iterable[str]) -> None:
        with self._lock:
            known = [i for i in request_ids if i in self._unfinished]
            self._unfinished.difference_update(known)
            if known:
                self._inbox.put(known)

    def call(self, name: str, *arguments: Any, core: int | None = None) -> Future[Any]:
        future: Future[Any] = Future()
        with self._lock:
            self._check_thread()
            self._inbox.put(_Call(future, name, arguments))
        return future

    def has_unfinished(self) -> bool:
        return bool(self._unfinished)

    def check_health(self, core: int | None = None) -> None:
        self._check_thread()
        self._core.check_alive()

    def _check_thread(self) -> None:
        if self._dead is not None:
            raise EngineDeadError("The engine core's thread has ended.") from self._dead

    def shutdown(self) -> None:
        """Waits for the step that is running."""
        with self._lock:
            if self._dead is None:
                self._dead = EngineDeadError("The engine was shut down.")
            self._inbox.put(None)
        self._thread.join()
        self._drop_calls()
        self._core.shutdown()

    def _drop_calls(self) -> None:
        """Nobody takes what is left in the inbox."""
        while not self._inbox.empty():
            if isinstance(message := self._inbox.get(), _Call):
                message.future.set_exception(EngineDeadError("The engine core's thread has ended."))

    def _run(self) -> None:
        try:
            while self._take_messages():
                self._deliver(self._core.step())
        except BaseException as error:
            self._end(error)

    def _take_messages(self) -> bool:
        """Pass on what has arrived, waiting for it when there is nothing else to do. False: shut down."""
        while True:
            try:
                message = self._inbox.get(block=not self._core.has_unfinished())
            except Empty:
                return True
            if message is None:
                return False
            if isinstance(message, list):
                self._core.abort_requests(message)
            elif isinstance(message, _Call):
                _settle(message.future, self._core, message.name, message.arguments)
            else:
                self._add(message)

    def _add(self, request: EngineCoreRequest) -> None:
        """A request that was checked can still be refused: its adapter is read here."""
        try:
            self._core.add_request(request)
        except ValueError as error:
            end = FinishedRequest(request.request_id, FinishReason.ERROR, str(error), True)
            self._deliver(EngineCoreOutputs(finished=[end]))

    def _deliver(self, outputs: EngineCoreOutputs) -> None:
        if outputs.finished:
            with self._lock:
                self._unfinished.difference_update([f.request_id for f in outputs.finished])
        if not outputs.is_empty:
            self._on_outputs(outputs)

    def _end(self, error: BaseException) -> None:
        """Nothing comes out of the thread any more: say so to whoever still waits."""
        with self._lock:
            self._dead = error
            self._drop_calls()
            left = sorted(self._unfinished)
            self._unfinished.clear()
        logger.error("The engine core's thread has ended.", exc_info=error)
        text = f"{type(error).__name__}: {error}"
        finished = [FinishedRequest(i, FinishReason.ERROR, text) for i in left]
        if finished:
            self._on_outputs(EngineCoreOutputs(finished=finished))
