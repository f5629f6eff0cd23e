"""A client of an engine core in another process, whose end fails what it had and harms nobody else."""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import Any

import msgspec

from jaxinfer.engine.child_process import text_of
from jaxinfer.engine.core_handle import Core
from jaxinfer.engine.errors import EngineDeadError
from jaxinfer.engine.ipc import (
    OWNER,
    Abort,
    Add,
    Beat,
    Call,
    Died,
    Outputs,
    Ready,
    Returned,
)
from jaxinfer.engine.messages import (
    EngineCoreOutputs,
    EngineCoreRequest,
    FinishedRequest,
    FinishReason,
)
from jaxinfer.engine.request import check_request

logger = logging.getLogger(__name__)


class ProcessClient:
    """An `EngineCoreClient` of a core that is ready. `on_outputs` is called in a thread of its own with every step's
    outputs; when the process dies, the last ones end every request with an error. `on_death` then hears why, unless
    the client was shut down. `client` is this one's number among the core's."""

    def __init__(
        self,
        core: Core,
        ready: Ready,
        on_outputs: Callable[[EngineCoreOutputs], None],
        client: int = OWNER,
        on_death: Callable[[str], None] | None = None,
    ) -> None:
        self._core = core
        self._model = ready.config.model
        self._on_outputs = on_outputs
        self._client = client
        self._on_death = on_death
        self._beat = Beat()
        self._num_sent = 0
        self._unfinished: set[str] = set()
        self._lock = threading.Lock()
        self._cause_of_death: str | None = None
        self._last_ids: list[str] = []
        self._calls: dict[int, Future[Any]] = {}
        self._call_numbers = itertools.count()
        self._thread = threading.Thread(target=self._run, name="jaxinfer-outputs", daemon=True)
        self._thread.start()

    def add_request(self, request: EngineCoreRequest, core: int | None = None) -> int:
        check_request(request, self._model)
        with self._lock:
            self._check_alive()
            if request.request_id in self._unfinished:
                raise ValueError(f"request_id {request.request_id!r} is already in use.")
            self._unfinished.add(request.request_id)
            self._num_sent += 1
            self._core.send(Add(request, self._client))
        return 0

    def abort_requests(self, request_ids: Iterable[str]) -> None:
        with self._lock:
            known = [i for i in request_ids if i in self._unfinished]
            self._unfinished.difference_update(known)
            if known and self._cause_of_death is None:
                self._core.send(Abort(known))

    def call(self, name: str, *arguments: Any, core: int | None = None) -> Future[Any]:
        future: Future[Any] = Future()
        with self._lock:
            self._check_alive()
            number = next(self._call_numbers)
            self._calls[number] = future
            self._core.send(Call(number, name, list(arguments), self._client))
        return future

    def has_unfinished(self) -> bool:
        return bool(self._unfinished)

    @property
    def load(self) -> Beat:
        """The core's latest report, in which requests wait that it hadn't read yet."""
        with self._lock:
            beat = self._beat
            num_waiting = beat.num_waiting + self._num_sent - beat.num_received
        return msgspec.structs.replace(beat, num_waiting=num_waiting)

    @property
    def is_alive(self) -> bool:
        return self._cause_of_death is None

    def check_health(self, core: int | None = None) -> None:
        with self._lock:
            self._check_alive()

    def shutdown(self) -> None:
        with self._lock:
            if self._cause_of_death is None:
                self._cause_of_death = "The engine was shut down."
        self._core.stop()
        self._thread.join()
        self._core.close()

    def _check_alive(self) -> None:
        if self._cause_of_death is not None:
            raise EngineDeadError(self._cause_of_death)

    def _run(self) -> None:
        cause = None
        try:
            while (message := self._core.receive()) is not None:
                if isinstance(message, Outputs):
                    self._deliver(message)
                elif isinstance(message, Returned):
                    self._settle(message)
                elif isinstance(message, Beat):
                    self._beat = message
                elif isinstance(message, Died):
                    cause = message.text
            cause = cause or self._core.describe_end()
        except BaseException as error:
            cause = text_of(error)
            raise
        finally:
            self._end(cause or "The engine core's process has ended.")

    def _deliver(self, message: Outputs) -> None:
        outputs = message.outputs
        if message.same_ids:
            outputs.request_ids = self._last_ids
        else:
            self._last_ids = outputs.request_ids
        if outputs.finished:
            with self._lock:
                self._unfinished.difference_update([f.request_id for f in outputs.finished])
        self._on_outputs(outputs)

    def _settle(self, message: Returned) -> None:
        with self._lock:
            future = self._calls.pop(message.number)
        if message.error is None:
            future.set_result(message.value)
        else:
            future.set_exception(ValueError(message.error))

    def _end(self, cause: str) -> None:
        """Nothing comes any more: say so to whoever still waits."""
        text = f"The engine core has died: {cause}"
        with self._lock:
            was_told_to = self._cause_of_death is not None
            if not was_told_to:
                self._cause_of_death = text
            calls = list(self._calls.values())
            self._calls.clear()
            left = sorted(self._unfinished)
            self._unfinished.clear()
        for future in calls:
            future.set_exception(EngineDeadError(text))
        if was_told_to:
            return
        logger.error("%s", text)
        if left:
            ends = [FinishedRequest(i, FinishReason.ERROR, text) for i in left]
            self._on_outputs(EngineCoreOutputs(finished=ends))
        if self._on_death is not None:
            self._on_death(cause)
