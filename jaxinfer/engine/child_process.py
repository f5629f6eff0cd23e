"""A child process that is talked to, and whose death is noticed at once."""

from __future__ import annotations

import logging
import os
import subprocess
import tempfile
import threading
from collections.abc import Mapping, Sequence
from typing import NoReturn

import msgspec

from jaxinfer.engine.link import Link

logger = logging.getLogger(__name__)

_STOP_SECONDS = 10.0


class ChildProcess[Sent, Received]:
    """`command` is what to run; the addresses of two sockets follow as its arguments: one that it binds, to read from,
    and one that it connects to. `title` names it in messages, `stop_message` asks it to exit, `environment` adds to
    this process's. It inherits the descriptors `pass_fds`.
    """

    def __init__(
        self,
        command: Sequence[str],
        decoder: msgspec.msgpack.Decoder[Received],
        stop_message: Sent,
        title: str,
        environment: Mapping[str, str] | None = None,
        pass_fds: Sequence[int] = (),
    ) -> None:
        self.title = title
        self._stop_message = stop_message
        self._directory = tempfile.TemporaryDirectory(prefix="jaxinfer-")
        self.inbox, outbox = (f"ipc://{self._directory.name}/{name}" for name in ("in", "out"))
        self._link: Link[Sent, Received] = Link(self.inbox, outbox, decoder)
        # A pipe at stdin tells the child when this process dies, however it dies.
        self._process: subprocess.Popen[bytes] = subprocess.Popen(
            [*command, self.inbox, outbox],
            stdin=subprocess.PIPE,
            env={**os.environ, **(environment or {})},
            pass_fds=pass_fds,
        )
        self._watcher = threading.Thread(target=self._watch, name="jaxinfer-watch", daemon=True)
        self._watcher.start()

    def _watch(self) -> None:
        self._process.wait()
        self._link.end()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def directory(self) -> str:
        """For sockets of others that want to talk to it; removed by `close`."""
        return self._directory.name

    def send(self, message: Sent) -> None:
        """Thread-safe; never blocks."""
        self._link.send(message)

    def receive(self) -> Received | None:
        """The next message; None when the process has ended and everything it said was read. One thread at a time."""
        return self._link.receive()

    def describe_end(self) -> str:
        """Of a process that has ended."""
        code = self._process.wait()
        how = f"was killed by signal {-code}" if code < 0 else f"exited ({code})"
        return f"{self.title} {how}."

    def stop(self) -> None:
        """Ask it to exit, and kill it when it doesn't."""
        if self._process.poll() is None:
            self.send(self._stop_message)
            if not self.wait(_STOP_SECONDS):
                logger.warning("%s doesn't stop; it is killed.", self.title)
                self.kill()

    def wait(self, seconds: float) -> bool:
        """Whether it has ended by then."""
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        return True

    def kill(self) -> None:
        """End it at once; whoever waits for a message hears that it has ended. `close` releases the rest."""
        self._process.kill()
        if not self.wait(_STOP_SECONDS):
            logger.error("%s (process %d) can't be killed.", self.title, self.pid)

    def close(self) -> None:
        """End the process and release the sockets. After the thread that receives has ended."""
        self.stop()
        if self._process.returncode is None:  # in the driver's hands: nothing can be waited for
            return
        self._watcher.join()
        self._link.close()
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._directory.cleanup()


def exit_with_parent() -> None:
    """In a child process: exit when the process that started it has died."""
    threading.Thread(target=_exit_with_parent, name="parent-watch", daemon=True).start()


def _exit_with_parent() -> NoReturn:
    # Not by way of `sys.stdin`, whose lock the interpreter wants when it exits.
    while os.read(0, 1):
        pass
    os._exit(1)


def text_of(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
