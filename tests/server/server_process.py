"""`jaxinfer serve` as people run it: a process of its own, on a free port."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

LIMIT = 600.0
"""Seconds for the model to be ready; programs are compiled on the first run."""
EXIT_LIMIT = 30.0
ROOT = Path(__file__).resolve().parents[2]


@dataclass
class ServerProcess:
    process: subprocess.Popen[str]
    url: str = ""
    log: list[str] = field(default_factory=list)

    def stop(self, number: int = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.process.wait(EXIT_LIMIT)

    @property
    def core_pid(self) -> int:
        [pid] = self.core_pids
        return pid

    @property
    def core_pids(self) -> list[int]:
        return self._children("core_main")

    @property
    def api_pids(self) -> list[int]:
        return self._children("api_main")

    def _children(self, program: str) -> list[int]:
        """Those that run it, in the order of their start."""
        tasks = Path(f"/proc/{self.process.pid}/task").glob("*/children")
        pids = sorted(int(pid) for task in tasks for pid in task.read_text().split())
        return [pid for pid in pids if program in _command_line(pid)]


def _command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:  # it has just ended
        return ""


@contextmanager
def server_process(command: Sequence[str]) -> Iterator[ServerProcess]:
    """Runs Python with these arguments until the server says that it is ready; killed at the end."""
    process = subprocess.Popen(
        [sys.executable, *command],
        cwd=ROOT,
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
    )
    server = ServerProcess(process)
    ready = threading.Event()

    def read() -> None:
        assert process.stderr is not None
        for line in process.stderr:
            server.log.append(line)
            if match := re.search(r"is ready at (http://\S+):", line):
                server.url = match[1]
                ready.set()
        ready.set()

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        assert ready.wait(LIMIT) and server.url, "".join(server.log)
        yield server
    finally:
        process.kill()
        process.wait()
        reader.join(EXIT_LIMIT)
