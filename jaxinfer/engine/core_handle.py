"""Engine cores in processes of their own, as those see them who talk to one: its parent, and others."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping, Sequence
from typing import Protocol

import msgspec

from jaxinfer.config import HEARTBEAT_TIMEOUT
from jaxinfer.engine.child_process import ChildProcess
from jaxinfer.engine.errors import EngineDeadError
from jaxinfer.engine.ipc import Attach, Died, FromCore, Pause, Ready, Start, Stop, ToCore
from jaxinfer.engine.link import Link
from jaxinfer.engine_args import EngineArgs


class CoreProcess(ChildProcess[ToCore, FromCore]):
    """A child process that builds and runs an engine core. `wait_ready`, then give it to a client.

    The child finds the engine's arguments in the first message. Once it is ready, it is killed when its loop hangs: when
    nothing is heard of it for `heartbeat_timeout` seconds (0: it is never killed). What may take long by its nature
    doesn't count: compilations, and calls, which load weights.
    """

    def __init__(
        self,
        command: Sequence[str],
        args: EngineArgs,
        heartbeat_timeout: float = HEARTBEAT_TIMEOUT,
        environment: Mapping[str, str] | None = None,
        title: str = "The engine core's process",
    ) -> None:
        decoder: msgspec.msgpack.Decoder[FromCore] = msgspec.msgpack.Decoder(FromCore)
        super().__init__(command, decoder, Stop(), title, environment)
        self._heartbeat_timeout = heartbeat_timeout or None
        self._limit: float | None = None
        self._hangs = False
        self.send(Start(args, min(1.0, heartbeat_timeout / 4 or 1.0)))

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

    def receive(self) -> FromCore | None:
        """None also when it was killed because it hung."""
        if self._hangs:
            return None
        try:
            message = self._link.receive(self._limit)
        except TimeoutError:
            self._hangs = True
            self._process.kill()
            return None
        self._limit = None if isinstance(message, Pause) else self._heartbeat_timeout
        return message

    def describe_end(self) -> str:
        if self._hangs:
            return f"{self.title} gave no sign of life for {self._heartbeat_timeout:g} s and was killed."
        return super().describe_end()


class AttachedCore:
    """A core that another process started, and of whose end that process tells (`end`). `inbox` is where it listens,
    `address` where this client is going to, as its `client` number."""

    def __init__(self, inbox: str, address: str, client: int) -> None:
        decoder: msgspec.msgpack.Decoder[FromCore] = msgspec.msgpack.Decoder(FromCore)
        self._link: Link[ToCore, FromCore] = Link(inbox, address, decoder)
        self._path = address.removeprefix("ipc://")
        self._lock = threading.Lock()
        self._cause: str | None = None
        self.send(Attach(client, address))

    def send(self, message: ToCore) -> None:
        self._link.send(message)

    def receive(self) -> FromCore | None:
        return self._link.receive()

    def end(self, cause: str) -> None:
        with self._lock:
            if self._cause is None:
                self._cause = cause
                self._link.end()

    def describe_end(self) -> str:
        return self._cause or "This client has left."

    def stop(self) -> None:
        self.end("This client has left.")

    def close(self) -> None:
        self.stop()
        self._link.close()
        if os.path.exists(self._path):
            os.unlink(self._path)


class Core(Protocol):
    """What a client needs of a core that is elsewhere. `receive` gives None once it has ended, and `describe_end` says
    how; `stop` makes it end, for this client at least, and `close` comes last."""

    def send(self, message: ToCore) -> None: ...

    def receive(self) -> FromCore | None: ...

    def describe_end(self) -> str: ...

    def stop(self) -> None: ...

    def close(self) -> None: ...
