"""An API server process, as the supervisor sees it."""

from __future__ import annotations

import socket
import sys
import threading
from collections.abc import Callable

import msgspec

from jaxinfer.engine.child_process import ChildProcess
from jaxinfer.engine.errors import EngineDeadError
from jaxinfer.server.control import Failed, FromServer, Leave, Loaded, StartServer, ToServer


class ApiServer(ChildProcess[ToServer, FromServer]):
    """An API server process over `bound`; `client` is its number among the cores' clients."""

    def __init__(
        self, log_level: str, bound: socket.socket, slot: int, client: int, start: StartServer
    ) -> None:
        descriptor = bound.fileno()
        command = [sys.executable, "-m", "jaxinfer.server.api_main", log_level, str(descriptor)]
        decoder: msgspec.msgpack.Decoder[FromServer] = msgspec.msgpack.Decoder(FromServer)
        title = f"API server {slot}'s process"
        super().__init__(command, decoder, Leave(), title, pass_fds=[descriptor])
        self.slot = slot
        self.client = client
        self.is_listening = False
        self.knows_cores = False
        self.thread: threading.Thread | None = None
        self.send(msgspec.structs.replace(start, client=client, directory=self.directory))

    def wait_loaded(self) -> None:
        """Raises `ValueError` for what can't be served, `EngineDeadError` for any other end."""
        message = self.receive()
        if isinstance(message, Loaded):
            return
        if isinstance(message, Failed) and message.is_bad_input:
            raise ValueError(message.text)
        raise EngineDeadError(message.text if isinstance(message, Failed) else self.describe_end())

    def follow(
        self,
        on_message: Callable[[ApiServer, FromServer], None],
        on_end: Callable[[ApiServer], None],
    ) -> None:
        """From now on, these are called in a thread of its own."""
        self.thread = threading.Thread(target=self._hear, args=(on_message, on_end), daemon=True)
        self.thread.start()

    def _hear(
        self,
        on_message: Callable[[ApiServer, FromServer], None],
        on_end: Callable[[ApiServer], None],
    ) -> None:
        while (message := self.receive()) is not None:
            on_message(self, message)
        on_end(self)

    def close(self) -> None:
        if self.thread is not None:
            self.thread.join()
        super().close()
