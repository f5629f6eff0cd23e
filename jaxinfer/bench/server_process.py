"""A server of our own for a measurement: started, waited for, stopped with all that it started."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

_READY = re.compile(r" is ready at (http://\S+):")
_STOP_SECONDS = 30.0


@contextmanager
def server_process(arguments: Sequence[str], start_timeout: float) -> Iterator[str]:
    """Runs `python -m jaxinfer serve` with these arguments on a free port, without a key; the URL when it is ready.

    Raises `OSError` with the end of its log when it ends or isn't ready within `start_timeout` seconds.
    """
    command = [sys.executable, "-m", "jaxinfer", "serve", *arguments, "--port", "0"]
    command.append("--disable-uvicorn-access-log")
    process = subprocess.Popen(
        command,
        env={name: value for name, value in os.environ.items() if name != "JAXINFER_API_KEY"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    log: deque[str] = deque(maxlen=20)
    found: list[str] = []
    known = threading.Event()

    def read() -> None:
        assert process.stderr is not None
        for line in process.stderr:
            log.append(line.rstrip())
            if match := _READY.search(line):
                found.append(match[1])
                known.set()
        known.set()

    reader = threading.Thread(target=read, name="server-log", daemon=True)
    reader.start()
    try:
        if not known.wait(start_timeout) or not found:
            raise OSError(f"the server did not start ({' '.join(command)}): {' | '.join(log)}")
        yield found[0]
    finally:
        _stop(process)
        reader.join()


def _stop(process: subprocess.Popen[str]) -> None:
    """The engine core ends with the server, which it watches."""
    process.terminate()
    try:
        process.wait(_STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
