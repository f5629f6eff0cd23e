"""The HTTP server: where it listens, and how it ends without losing requests."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
from collections.abc import Callable, Coroutine, Iterator
from functools import partial
from http import HTTPStatus
from pathlib import Path
from types import FrameType
from typing import Any

import uvicorn
from fastapi import FastAPI

from jaxinfer.server.anatomy import ANATOMY_PATH
from jaxinfer.server.args import ListenArgs
from jaxinfer.server.ssl_refresh import refresh_certificates

logger = logging.getLogger(__name__)


class HttpServer(uvicorn.Server):
    """uvicorn's raises the signal again once it has shut down, which would end the process before the engine has.
    `on_started` is called when it listens. Without `handle_signals`, somebody else calls `handle_exit`."""

    def __init__(
        self,
        app: FastAPI,
        listen: ListenArgs,
        on_started: Callable[[], None],
        handle_signals: bool = True,
    ) -> None:
        super().__init__(_uvicorn_config(app, listen))
        self._on_started = on_started
        self._handle_signals = handle_signals
        self.last_signal: int | None = None
        self.background: list[Callable[[], Coroutine[Any, Any, None]]] = []
        if listen.enable_ssl_refresh:
            self.background.append(partial(self._refresh_certificates, listen))
        self._tasks: list[asyncio.Task[None]] = []

    async def _refresh_certificates(self, listen: ListenArgs) -> None:
        """Once it listens, with a certificate."""
        assert self.config.ssl is not None and listen.ssl_certfile is not None
        await refresh_certificates(
            self.config.ssl, listen.ssl_certfile, listen.ssl_keyfile, listen.ssl_ca_certs
        )

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._tasks = [asyncio.create_task(work()) for work in self.background]
        self._on_started()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for task in self._tasks:
            task.cancel()
        await super().shutdown(sockets)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        numbers = (signal.SIGINT, signal.SIGTERM) if self._handle_signals else ()
        for number in numbers:
            loop.add_signal_handler(number, self.handle_exit, number, None)
        try:
            yield
        finally:
            for number in numbers:
                loop.remove_signal_handler(number)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if not self.should_exit:
            logger.info("%s: finishing what runs.", signal.Signals(sig).name)
        self.last_signal = sig
        super().handle_exit(sig, frame)


def _is_worth_a_line(record: logging.LogRecord) -> bool:
    """Each page that is open asks for `/anatomy` twice a second. Of uvicorn's access log: client, method, path, version,
    status."""
    match record.args:
        case (_, "GET", str(path), _, HTTPStatus.OK):
            return not path.partition("?")[0].endswith(ANATOMY_PATH)
    return True


def _uvicorn_config(app: FastAPI, listen: ListenArgs) -> uvicorn.Config:
    config = uvicorn.Config(
        app,
        log_level=listen.uvicorn_log_level,
        access_log=not listen.disable_uvicorn_access_log,
        root_path=listen.root_path,
        ssl_keyfile=listen.ssl_keyfile,
        ssl_certfile=listen.ssl_certfile,
        ssl_ca_certs=listen.ssl_ca_certs,
        ssl_cert_reqs=listen.ssl_cert_reqs,
        ssl_ciphers=listen.ssl_ciphers,
        timeout_keep_alive=listen.timeout_keep_alive,
        timeout_graceful_shutdown=listen.shutdown_timeout,
    )
    logging.getLogger("uvicorn.access").addFilter(_is_worth_a_line)
    return config


def bind(listen: ListenArgs) -> socket.socket:
    """Claims the address; nobody can connect until the server listens, when the model is ready."""
    if listen.uds is not None:
        path = Path(listen.uds)
        if path.is_socket():  # of a server that has ended
            path.unlink()
        bound = socket.socket(socket.AF_UNIX)
        bound.bind(listen.uds)
        return bound
    family = socket.AF_INET6 if ":" in listen.host else socket.AF_INET
    bound = socket.socket(family)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((listen.host, listen.port))
    except OSError as error:
        bound.close()
        raise OSError(f"can't listen on {listen.host}:{listen.port}: {error.strerror}") from error
    return bound


def bind_several(listen: ListenArgs, count: int) -> list[socket.socket]:
    """One for each process: of a TCP port, the kernel spreads connections over them; a Unix socket is shared. Raises as
    `bind`."""
    first = bind(listen)
    if listen.uds is not None:
        return [first, *(first.dup() for _ in range(count - 1))]
    # Sockets that share a port don't notice that others have it, if those share it, too.
    host, port = first.getsockname()[:2]
    family = first.family
    first.close()
    sockets: list[socket.socket] = []
    try:
        for _ in range(count):
            sockets.append(socket.socket(family))
            sockets[-1].setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sockets[-1].setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            sockets[-1].bind((host, port))
    except OSError as error:
        for one in sockets:
            one.close()
        raise OSError(f"can't listen on {host}:{port}: {error.strerror}") from error
    return sockets
