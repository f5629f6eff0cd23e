"""`jaxinfer serve`: the engine core's process, the application, and an HTTP server that ends without losing requests."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
from collections.abc import Sequence
from functools import partial

from jaxinfer.async_llm import AsyncLLM
from jaxinfer.engine.cache_demand import CacheDemand
from jaxinfer.engine.ipc import Ready
from jaxinfer.engine_args import EngineArgs
from jaxinfer.remote_core import CoreStarter, start_remote_engine
from jaxinfer.server.app import build_app
from jaxinfer.server.args import ListenArgs
from jaxinfer.server.http_server import HttpServer, bind, bind_several
from jaxinfer.server.restart import restart_when_dead
from jaxinfer.server.serving import Serving
from jaxinfer.server.settings import ServerSettings
from jaxinfer.server.supervisor import Supervisor
from jaxinfer.server.tracing import open_tracing

logger = logging.getLogger(__name__)


def serve(
    args: EngineArgs, settings: ServerSettings, listen: ListenArgs, command: Sequence[str]
) -> int:
    """Serve until a signal; returns the exit code. `command` runs the engine core (`remote_core.core_command`).

    Raises `OSError` when the address is taken and `ValueError` when traces can't be sent, before anything is loaded, and
    as `start_remote_engine`.
    """
    starter = CoreStarter(args, command, listen.engine_heartbeat_timeout)
    if listen.api_server_count > 1:
        return _serve_by_several(starter, settings, listen)
    with contextlib.closing(bind(listen)) as bound, open_tracing(settings) as tracing:
        engine = start_remote_engine(starter, listen.data_parallel_routing)
        llm = AsyncLLM.from_client(engine.frontend, engine.connect, engine.num_blocks)
        try:
            ready = _ready_line(engine.ready, settings, listen, bound)
            serving = Serving(llm, settings)
            asyncio.run(serving.load_adapters())
            app = build_app(llm, settings, tracing=tracing, serving=serving)
            server = HttpServer(app, listen, partial(logger.info, "%s", ready))
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


def _serve_by_several(starter: CoreStarter, settings: ServerSettings, listen: ListenArgs) -> int:
    """Several API server processes."""
    with contextlib.ExitStack() as stack:
        sockets = bind_several(listen, listen.api_server_count)
        for bound in sockets:
            stack.enter_context(contextlib.closing(bound))
        supervisor = Supervisor(starter, settings, listen, sockets)
        return supervisor.run(_ready_line(supervisor.ready, settings, listen, sockets[0]))


def _ready_line(
    ready: Sequence[Ready], settings: ServerSettings, listen: ListenArgs, bound: socket.socket
) -> str:
    scheme = "https" if listen.ssl_certfile else "http"
    where = listen.uds or f"{scheme}://{listen.host}:{bound.getsockname()[1]}"
    return f"{settings.served_model_name[0]} is ready at {where}: {_describe_caches(ready)}"


def _describe_caches(ready: Sequence[Ready]) -> str:
    """One line; all cores are built alike."""
    config, num_blocks = ready[0].config, ready[0].num_blocks
    if config.pooler is not None and config.pooler.is_encoder:
        return f"{' and '.join(config.pooler.tasks)}, texts of up to {config.model.max_model_len} tokens."
    room = CacheDemand.of(config).num_requests(num_blocks - 1, config.max_blocks_per_seq)
    cores = "" if len(ready) == 1 else f"{len(ready)} engine cores, each with a "
    return (
        f"{cores}KV cache of {ready[0].num_blocks} blocks of {config.cache.block_size} tokens, room for "
        f"{room:.1f} requests of {config.model.max_model_len} tokens."
    )
