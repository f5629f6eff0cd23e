"""`--api-server-count`: starts the engine cores and several processes that answer HTTP, and looks after all of them.

Each API server process talks to each core directly. This one owns the cores: it hears of their steps and of their end,
tells the others, adds up what all of them have counted, and says when to drain.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import signal
import socket
from collections.abc import Coroutine, Sequence
from functools import partial
from typing import Any

from jaxinfer.engine.core_handle import CoreProcess
from jaxinfer.engine.errors import EngineDeadError
from jaxinfer.engine.ipc import Detach, Ready
from jaxinfer.engine.process_client import ProcessClient
from jaxinfer.remote_core import CoreStarter, end, wait_ready
from jaxinfer.server.api_process import ApiServer
from jaxinfer.server.args import ListenArgs
from jaxinfer.server.control import (
    Ask,
    CoreDown,
    Cores,
    CoreUp,
    Drain,
    Failed,
    Find,
    Forget,
    FromServer,
    Keep,
    Kept,
    Leave,
    Listening,
    Loaded,
    Report,
    Served,
    Slept,
    StartServer,
    ToServer,
    pack_settings,
)
from jaxinfer.server.count_collector import CountCollector
from jaxinfer.server.response_store import ResponseStore
from jaxinfer.server.restart import CHECK_SECONDS, LONGEST_PAUSE_SECONDS
from jaxinfer.server.settings import ServerSettings
from jaxinfer.server.shared_metrics import SharedMetrics

logger = logging.getLogger(__name__)

_EXIT_SECONDS = 10.0
"""How long it may take to exit, beyond what running requests have."""


class Supervisor:
    """`sockets` are those of the API server processes; they are closed in the end. `run` returns the exit code.

    Raises as `start_remote_engine` when the cores or the API servers can't start.
    """

    def __init__(
        self,
        starter: CoreStarter,
        settings: ServerSettings,
        listen: ListenArgs,
        sockets: Sequence[socket.socket],
    ) -> None:
        self._starter = starter
        self._listen = listen
        self._sockets = sockets
        self._log_level = logging.getLevelName(logging.getLogger().getEffectiveLevel()).lower()
        self._start = StartServer(starter.args, pack_settings(settings), listen, 0, "")
        self._clients = itertools.count(1)
        self._responses = ResponseStore(
            settings.max_stored_responses, settings.max_stored_response_bytes
        )
        self._adapters: dict[str, Served] = {}
        """Those that came or went while the servers ran."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._last_signal: int | None = None
        self._is_ready = False
        self._failure: Exception | None = None
        self._servers: list[ApiServer | None] = []
        processes = starter.start_all()
        try:
            for slot in range(len(sockets)):
                self._servers.append(self._new_server(slot))
            for server in self._servers:
                if server is not None:
                    server.wait_loaded()
            self.ready = wait_ready(processes)
        except BaseException:
            end(processes)
            self._end_servers()
            raise
        self._processes = processes
        self._metrics = SharedMetrics(
            self.ready[0].config,
            [ready.num_blocks for ready in self.ready],
            settings.served_model_name[0],
            self._num_open,
        )
        self._cores: list[ProcessClient] = []
        self._counts = CountCollector(
            self._metrics, lambda core: self._cores[core].check_health(), self._servers
        )

    def _new_server(self, slot: int) -> ApiServer:
        client = next(self._clients)
        return ApiServer(self._log_level, self._sockets[slot], slot, client, self._start)

    def run(self, ready_line: str) -> int:
        try:
            asyncio.run(self._run(ready_line))
        finally:
            self._end_servers()
            for core in self._cores:
                core.shutdown()
        if self._failure is not None:
            raise self._failure
        return 130 if self._last_signal == signal.SIGINT else 0

    async def _run(self, ready_line: str) -> None:
        self._loop = asyncio.get_running_loop()
        self._ready_line = ready_line
        self._all_ended = asyncio.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            self._loop.add_signal_handler(number, self._on_signal, number)
        for core, (process, ready) in enumerate(zip(self._processes, self.ready, strict=True)):
            self._cores.append(self._connect(core, process, ready))
        for server in self._servers:
            if server is not None:
                self._follow(server)
                self._tell_cores(server)
        await self._all_ended.wait()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _do(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # ---- cores -------------------------------------------------------------------------------------------------------

    def _connect(self, core: int, process: CoreProcess, ready: Ready) -> ProcessClient:
        return ProcessClient(
            process,
            ready,
            partial(self._metrics.step, core),
            on_death=lambda cause: self._call(self._core_died, core, cause),
        )

    def _num_open(self, core: int) -> int:
        load = self._cores[core].load
        return load.num_running + load.num_waiting

    def _call(self, function: Any, *arguments: Any) -> None:
        """From another thread."""
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(function, *arguments)

    def _core_died(self, core: int, cause: str) -> None:
        self._tell_all(CoreDown(core, cause))
        if self._listen.restart_engine and self._last_signal is None:
            self._do(self._restart_core(core))

    async def _restart_core(self, core: int) -> None:
        pause = CHECK_SECONDS
        while True:
            await asyncio.sleep(pause)
            logger.warning("Engine core %d is started again.", core)
            process = self._starter.start(core)
            try:
                ready = await asyncio.to_thread(process.wait_ready)
            except (EngineDeadError, ValueError) as error:
                pause = min(2 * pause, LONGEST_PAUSE_SECONDS)
                logger.error("It can't start (again in %.0f s): %s", pause, error)
                continue
            except asyncio.CancelledError:
                process.kill()
                raise
            break
        await asyncio.to_thread(self._cores[core].shutdown)
        self._processes[core], self.ready[core] = process, ready
        self._cores[core] = self._connect(core, process, ready)
        self._tell_all(CoreUp(core, ready, process.inbox))
        logger.info("Engine core %d serves again.", core)

    # ---- API servers -------------------------------------------------------------------------------------------------

    def _follow(self, server: ApiServer) -> None:
        server.follow(partial(self._call, self._handle), partial(self._call, self._ended))

    def _tell_cores(self, server: ApiServer) -> None:
        inboxes = [
            process.inbox if core.is_alive else None
            for process, core in zip(self._processes, self._cores, strict=True)
        ]
        server.send(Cores(self.ready[0], inboxes))
        server.knows_cores = True
        for adapter in self._adapters.values():
            server.send(adapter)

    def _tell_all(self, message: ToServer) -> None:
        for server in self._servers:
            if server is not None and server.knows_cores:
                server.send(message)

    def _handle(self, server: ApiServer, message: FromServer) -> None:
        if isinstance(message, Report):
            self._counts.add(server, message)
        elif isinstance(message, Ask):
            self._do(self._counts.answer(server, message))
        elif isinstance(message, Keep):
            self._responses.keep(message.id, message.response)
            server.send(Kept(message.number, None, True))
        elif isinstance(message, Find):
            found = self._responses.get(message.id)
            server.send(Kept(message.number, found, found is not None))
        elif isinstance(message, Forget):
            server.send(Kept(message.number, None, self._responses.remove(message.id)))
        elif isinstance(message, Served):
            self._adapters[message.name] = message
            self._tell_all(message)
        elif isinstance(message, Slept):
            self._metrics.slept(message.level)
        elif isinstance(message, Listening):
            server.is_listening = True
            self._log_ready()
        elif isinstance(message, Loaded):
            self._tell_cores(server)
        elif isinstance(message, Failed):
            logger.error("%s can't start: %s", server.title, message.text)
            if not self._is_ready and message.is_bad_input:
                self._failure = ValueError(message.text)

    def _log_ready(self) -> None:
        if not self._is_ready and all(s is not None and s.is_listening for s in self._servers):
            self._is_ready = True
            logger.info("%s", self._ready_line)

    def _ended(self, server: ApiServer) -> None:
        """Its requests end, and while nothing is drained another takes its place."""
        for process, core in zip(self._processes, self._cores, strict=True):
            if core.is_alive:
                process.send(Detach(server.client))
        self._counts.ended(server)
        self._servers[server.slot] = None
        server.close()
        if self._last_signal is None and not self._is_ready:
            self._failure = self._failure or EngineDeadError(server.describe_end())
            self._all_ended.set()
        elif self._last_signal is None:
            logger.error("%s", server.describe_end())
            pause = CHECK_SECONDS if server.is_listening else LONGEST_PAUSE_SECONDS
            self._do(self._restart_server(server.slot, pause))
        elif not any(self._servers):
            self._all_ended.set()

    async def _restart_server(self, slot: int, pause: float) -> None:
        await asyncio.sleep(pause)
        if self._last_signal is not None:
            return
        logger.warning("API server %d is started again.", slot)
        server = self._servers[slot] = self._new_server(slot)
        self._follow(server)

    # ---- the end -----------------------------------------------------------------------------------------------------

    def _on_signal(self, number: int) -> None:
        if self._last_signal is None:
            logger.info("%s: finishing what runs.", signal.Signals(number).name)
            self._do(self._end_in_time())
        self._last_signal = number
        # Nobody connects any more once the processes have closed theirs.
        for bound in self._sockets:
            bound.close()
        for server in self._servers:
            if server is not None:
                server.send(Drain(number) if server.is_listening else Leave())
        if not any(self._servers):
            self._all_ended.set()

    async def _end_in_time(self) -> None:
        await asyncio.sleep(self._listen.shutdown_timeout + _EXIT_SECONDS)
        logger.warning("API server processes don't exit; they are killed.")
        for server in self._servers:
            if server is not None:
                server.kill()

    def _end_servers(self) -> None:
        for server in self._servers:
            if server is not None:
                server.kill()
                server.close()
