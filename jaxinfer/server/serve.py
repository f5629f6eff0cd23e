"""`jaxinfer serve`: the engine core's process, the application, and an HTTP server that ends without losing requests."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
from collections.abc import Callable, Coroutine, Iterator, Sequence
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import uvicorn
from fastapi import FastAPI

from jaxinfer.async_llm import AsyncLLM
from jaxinfer.config import EngineArgs
from jaxinfer.engine.cache_demand import CacheDemand
from jaxinfer.engine.ipc import Ready
from jaxinfer.remote_core import CoreStarter, RemoteEngine, start_remote_engine
from jaxinfer.server.app import build_app
from jaxinfer.server.args import ListenArgs
from jaxinfer.server.restart import restart_when_dead
from jaxinfer.server.settings import ServerSettings
from jaxinfer.server.tracing import Tracing, otlp_exporter

logger = logging.getLogger(__name__)


def serve(
    args: EngineArgs, settings: ServerSettings, listen: ListenArgs, command: Sequence[str]
) -> int:
    """Serve until a signal; returns the exit code. `command` runs the engine core (`remote_core.core_command`).

    Raises `OSError` when the address is taken and `ValueError` when traces can't be sent, before anything is loaded, and
    as `start_remote_engine`.
    """
    with contextlib.closing(_bind(listen)) as bound, _tracing(settings) as tracing:
        starter = CoreStarter(args, command, listen.engine_heartbeat_timeout)
        engine = start_remote_engine(starter, listen.data_parallel_routing)
        llm = AsyncLLM.from_client(engine.frontend, engine.connect, engine.num_blocks)
        try:
            ready = _ready_line(engine, settings, listen, bound)
            app = build_app(llm, settings, tracing=tracing)
            server = _Server(_uvicorn_config(app, listen), ready)
            if listen.restart_engine and engine.cores is not None:
                server.background += [
                    partial(restart_when_dead, engine.cores, core, starter)
                    for core in range(args.data_parallel_size)
                ]
            with asyncio.Runner(loop_factory=server.config.get_loop_factory()) as runner:
                runner.run(server.serve([bound]))
        finally:
            llm.shutdown()
    return 130 if server.last_signal == signal.SIGINT else 0


class _Server(uvicorn.Server):
    """uvicorn's raises the signal again once it has shut down, which would end the process before the engine has."""

    def __init__(self, config: uvicorn.Config, ready_line: str) -> None:
        super().__init__(config)
        self._ready_line = ready_line
        self.last_signal: int | None = None
        self.background: list[Callable[[], Coroutine[Any, Any, None]]] = []
        self._tasks: list[asyncio.Task[None]] = []

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._tasks = [asyncio.create_task(work()) for work in self.background]
        logger.info("%s", self._ready_line)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for task in self._tasks:
            task.cancel()
        await super().shutdown(sockets)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        numbers = (signal.SIGINT, signal.SIGTERM)
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


def _bind(listen: ListenArgs) -> socket.socket:
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


@contextlib.contextmanager
def _tracing(settings: ServerSettings) -> Iterator[Tracing | None]:
    if settings.otlp_traces_endpoint is None:
        yield None
        return
    exporter = otlp_exporter(settings.otlp_traces_endpoint)
    tracing = Tracing(exporter, settings.served_model_name[0])
    try:
        yield tracing
    finally:
        tracing.shutdown()


def _uvicorn_config(app: FastAPI, listen: ListenArgs) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        log_level=listen.uvicorn_log_level,
        access_log=not listen.disable_uvicorn_access_log,
        root_path=listen.root_path,
        ssl_keyfile=listen.ssl_keyfile,
        ssl_certfile=listen.ssl_certfile,
        ssl_ca_certs=listen.ssl_ca_certs,
        ssl_cert_reqs=listen.ssl_cert_reqs,
        ssl_ciphers=listen.ssl_ciphers,
        timeout_graceful_shutdown=listen.shutdown_timeout,
    )


def _ready_line(
    engine: RemoteEngine, settings: ServerSettings, listen: ListenArgs, bound: socket.socket
) -> str:
    scheme = "https" if listen.ssl_certfile else "http"
    where = listen.uds or f"{scheme}://{listen.host}:{bound.getsockname()[1]}"
    return f"{settings.served_model_name[0]} is ready at {where}: {_describe_caches(engine.ready)}"


def _describe_caches(ready: Sequence[Ready]) -> str:
    """One line; all cores are built alike."""
    config, num_blocks = ready[0].config, ready[0].num_blocks
    room = CacheDemand.of(config).num_requests(num_blocks - 1, config.max_blocks_per_seq)
    cores = "" if len(ready) == 1 else f"{len(ready)} engine cores, each with a "
    return (
        f"{cores}KV cache of {ready[0].num_blocks} blocks of {config.cache.block_size} tokens, room for "
        f"{room:.1f} requests of {config.model.max_model_len} tokens."
    )
