"""A server under measurement: a process with everything it starts, on a free port, its log in a file."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from .http_client import Address

_STOP_SECONDS = 30.0


class ServerError(RuntimeError):
    """A server didn't start; the message holds the end of its log."""


@dataclass(frozen=True)
class Server:
    process: subprocess.Popen[bytes]
    address: Address

    @property
    def descendants(self) -> list[int]:
        """Processes that it started, and those that they did."""
        found, waiting = [], [self.process.pid]
        while waiting:
            children = _children(waiting.pop())
            found += children
            waiting += children
        return found

    @property
    def core_pid(self) -> int:
        """Of jaxinfer's engine core."""
        [core] = [pid for pid in self.descendants if b"jaxinfer.core_main" in _command_line(pid)]
        return core


def jaxinfer_command(model: str, *flags: str) -> list[str]:
    return [
        sys.executable,
        "-m",
        "jaxinfer",
        "serve",
        model,
        "--disable-uvicorn-access-log",
        *flags,
    ]


@contextlib.contextmanager
def running_server(
    command: Sequence[str],
    log: Path,
    environment: Mapping[str, str] | None = None,
    start_limit: float = 600.0,
) -> Iterator[Server]:
    """Ready when `/health` answers 200; ended with whatever it started, also when this process is told to end. Raises
    `ServerError`."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with log.open("ab") as output:
        process = subprocess.Popen(
            [*command, "--host", "127.0.0.1", "--port", str(port)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env={**os.environ, **(environment or {})},
            start_new_session=True,
        )
    try:
        server = Server(process, Address("127.0.0.1", port))
        _wait_until_healthy(server, log, time.monotonic() + start_limit)
        yield server
    finally:
        _stop(process)


def _wait_until_healthy(server: Server, log: Path, end: float) -> None:
    url = f"http://{server.address.host}:{server.address.port}/health"
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    while time.monotonic() < end and server.process.poll() is None:
        with contextlib.suppress(OSError), opener.open(url, timeout=5) as answer:
            if answer.status == 200:
                return
        time.sleep(0.2)
    tail = log.read_bytes()[-2000:].decode(errors="replace")
    raise ServerError(f"{server.process.args} did not start:\n{tail}")


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Nicely, then with the whole process group."""
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_STOP_SECONDS)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _children(pid: int) -> list[int]:
    """Of all its threads; none when it has ended."""
    found: list[int] = []
    with contextlib.suppress(OSError):
        for path in Path(f"/proc/{pid}/task").glob("*/children"):
            found += map(int, path.read_text().split())
    return found


def _command_line(pid: int) -> bytes:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""
