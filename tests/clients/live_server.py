"""The scripted server behind a real socket, for clients in processes of their own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from jaxinfer.server.args import ListenArgs
from jaxinfer.server.http_server import HttpServer, bind
from tests.server.scripted_server import Script, scripted_server

LIMIT = 60.0
"""Seconds for the server to listen, and to end."""


@contextmanager
def live_server(
    script: Script, settings: dict[str, Any], max_model_len: int = 2048, **listen_args: Any
) -> Iterator[str]:
    """Its URL, without a path. It runs in a thread."""
    listen = ListenArgs(port=0, uvicorn_log_level="warning", shutdown_timeout=1, **listen_args)
    bound = bind(listen)
    host, port = bound.getsockname()
    ready = threading.Event()
    running: list[HttpServer] = []

    async def serve() -> None:
        async with scripted_server(script, settings, max_model_len) as server:
            http = HttpServer(server.app, listen, ready.set, handle_signals=False)
            running.append(http)
            await http.serve(sockets=[bound])

    thread = threading.Thread(target=asyncio.run, args=(serve(),), daemon=True)
    thread.start()
    try:
        assert ready.wait(LIMIT)
        yield f"http://{host}:{port}"
    finally:
        for http in running:
            http.should_exit = True
        thread.join(LIMIT)
        bound.close()
