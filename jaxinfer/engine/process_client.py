"""The engine core in a process of its own, reached over ZeroMQ: its death is noticed at once and harms nobody else."""

from __future__ import annotations

import itertools
import logging
import os
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from typing import Any

import msgspec
import zmq

from jaxinfer.config import EngineArgs
from jaxinfer.engine.errors import EngineDeadError
from jaxinfer.engine.ipc import (
    Abort,
    Add,
    Call,
    Died,
    FromCore,
    Outputs,
    Ready,
    Returned,
    Start,
    Stop,
    ToCore,
)
from jaxinfer.engine.messages import (
    EngineCoreOutputs,
    EngineCoreRequest,
    FinishedRequest,
    FinishReason,
)
from jaxinfer.engine.request import check_request

logger = logging.getLogger(__name__)

_STOP_SECONDS = 10.0


class CoreProcess:
    """A child process that builds and runs an engine core. `wait_ready`, then give it to a client.

    `command` is what to run; the addresses of two sockets follow as its arguments. The child finds the engine's
    arguments in the first message.
    """

    def __init__(self, command: Sequence[str], args: EngineArgs) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="jaxinfer-")
        inbox, outbox = (f"ipc://{self._directory.name}/{name}" for name in ("in", "out"))
        self._context = zmq.Context[zmq.Socket[bytes]]()
        self._to_core = self._context.socket(zmq.PUSH)
        self._from_core = self._context.socket(zmq.PULL)
        for socket in (self._to_core, self._from_core):
            # Nothing may be lost or block: the scheduler's queue is where requests wait.
            socket.set_hwm(0)
        self._from_core.bind(outbox)
        # The side that connects can send at once, and after the other one's death; one that binds would block.
        self._to_core.connect(inbox)
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[FromCore] = msgspec.msgpack.Decoder(FromCore)
        self._send_lock = threading.Lock()
        # A pipe at stdin tells the child when this process dies, however it dies.
        self._process = subprocess.Popen([*command, inbox, outbox], stdin=subprocess.PIPE)
        self._has_exited, write_end = os.pipe()
        self._watcher = threading.Thread(
            target=self._watch, args=(write_end,), name="jaxinfer-core-watch", daemon=True
        )
        self._watcher.start()
        self.send(Start(args))

    def _watch(self, write_end: int) -> None:
        """Makes the process's end something that can be polled."""
        self._process.wait()
        os.write(write_end, b"x")
        os.close(write_end)

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait_ready(self) -> Ready:
        """Raises `ValueError` for arguments or a model that can't be run, `EngineDeadError` for any other end; both
        leave the process closed."""
        message = self.receive()
        if isinstance(message, Ready):
            return message
        self.close()
        if isinstance(message, Died) and message.is_bad_input:
            raise ValueError(message.text)
        raise EngineDeadError(message.text if isinstance(message, Died) else self.describe_end())

    def send(self, message: ToCore) -> None:
        """Thread-safe; never blocks."""
        with self._send_lock:
            if not self._to_core.closed:
                self._to_core.send(self._encoder.encode(message))

    def receive(self) -> FromCore | None:
        """The next message; None when the process has ended and everything it said was read. One thread at a time."""
        poller = zmq.Poller()
        poller.register(self._from_core, zmq.POLLIN)
        poller.register(self._has_exited, zmq.POLLIN)
        while True:
            ready = dict(poller.poll())
            if self._from_core in ready:
                return self._decoder.decode(self._from_core.recv())
            if self._has_exited in ready:
                # What it sent last may still be on its way through ZeroMQ's own thread.
                return self._last_words()

    def _last_words(self) -> FromCore | None:
        if self._from_core.poll(100):
            return self._decoder.decode(self._from_core.recv())
        return None

    def describe_end(self) -> str:
        """Of a process that has ended."""
        code = self._process.wait()
        how = f"was killed by signal {-code}" if code < 0 else f"exited ({code})"
        return f"The engine core's process {how}."

    def stop(self) -> None:
        """Ask it to exit, and kill it when it doesn't."""
        if self._process.poll() is None:
            self.send(Stop())
            try:
                self._process.wait(_STOP_SECONDS)
            except subprocess.TimeoutExpired:
                logger.warning("The engine core's process doesn't stop; it is killed.")
                self._process.kill()
                self._process.wait()

    def kill(self) -> None:
        """End it at once; whoever waits for a message hears that it has ended. `close` releases the rest."""
        self._process.kill()
        self._process.wait()

    def close(self) -> None:
        """End the process and release the sockets. After the thread that receives has ended."""
        self.stop()
        with self._send_lock:
            if self._to_core.closed:
                return
            self._to_core.close(0)
        self._from_core.close(0)
        self._context.term()
        self._watcher.join()
        os.close(self._has_exited)
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._directory.cleanup()


class ProcessClient:
    """An `EngineCoreClient` of a core that is ready. `on_outputs` is called in a thread of its own with every step's
    outputs; when the process dies, the last ones end every request with an error."""

    def __init__(
        self, core: CoreProcess, ready: Ready, on_outputs: Callable[[EngineCoreOutputs], None]
    ) -> None:
        self._core = core
        self._model = ready.config.model
        self._on_outputs = on_outputs
        self._unfinished: set[str] = set()
        self._lock = threading.Lock()
        self._cause_of_death: str | None = None
        self._last_ids: list[str] = []
        self._calls: dict[int, Future[Any]] = {}
        self._call_numbers = itertools.count()
        self._thread = threading.Thread(target=self._run, name="jaxinfer-outputs", daemon=True)
        self._thread.start()

    def add_request(self, request: EngineCoreRequest) -> None:
        check_request(request, self._model)
        with self._lock:
            self._check_alive()
            if request.request_id in self._unfinished:
                raise ValueError(f"request_id {request.request_id!r} is already in use.")
            self._unfinished.add(request.request_id)
            self._core.send(Add(request))

    def abort_requests(self, request_ids: Iterable[str]) -> None:
        with self._lock:
            known = [i for i in request_ids if i in self._unfinished]
            self._unfinished.difference_update(known)
            if known and self._cause_of_death is None:
                self._core.send(Abort(known))

    def call(self, name: str, *arguments: Any) -> Future[Any]:
        future: Future[Any] = Future()
        with self._lock:
            self._check_alive()
            number = next(self._call_numbers)
            self._calls[number] = future
            self._core.send(Call(number, name, list(arguments)))
        return future

    def has_unfinished(self) -> bool:
        return bool(self._unfinished)

    def check_health(self) -> None:
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
                elif isinstance(message, Died):
                    cause = message.text
            cause = cause or self._core.describe_end()
        except BaseException as error:
            cause = f"{type(error).__name__}: {error}"
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
        with self._lock:
            calls = list(self._calls.values())
            self._calls.clear()
        for future in calls:
            future.set_exception(EngineDeadError(f"The engine core has died: {cause}"))
        with self._lock:
            was_told_to = self._cause_of_death is not None
            if not was_told_to:
                self._cause_of_death = f"The engine core has died: {cause}"
            left = sorted(self._unfinished)
            self._unfinished.clear()
        if was_told_to:
            return
        logger.error("The engine core has died: %s", cause)
        if left:
            ends = [FinishedRequest(i, FinishReason.ERROR, self._cause_of_death) for i in left]
            self._on_outputs(EngineCoreOutputs(finished=ends))
