"""One of several API server processes: `python -m jaxinfer.server.api_main LOG_LEVEL SOCKET_FD INBOX OUTBOX`, started by
`jaxinfer.server.supervisor`. It answers HTTP; the cores, and whoever counts, are other processes."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import signal
import socket
import sys
import threading
from collections.abc import Callable, Sequence
from functools import partial

import msgspec

from jaxinfer.async_llm import AsyncLLM
from jaxinfer.engine.child_process import exit_with_parent, text_of
from jaxinfer.engine.core_group import ConnectCore, CoreGroup
from jaxinfer.engine.core_handle import AttachedCore
from jaxinfer.engine.ipc import Ready
from jaxinfer.engine.link import Link
from jaxinfer.engine.messages import EngineCoreOutputs
from jaxinfer.engine.process_client import ProcessClient
from jaxinfer.engine_factory import build_frontend, load_tokenizer, model_files
from jaxinfer.metrics import Metric
from jaxinfer.remote_core import load_balancer
from jaxinfer.server.app import build_app
from jaxinfer.server.args import ListenArgs
from jaxinfer.server.control import (
    Answer,
    Ask,
    Collect,
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
    Served,
    Slept,
    StartServer,
    ToServer,
    unpack_settings,
)
from jaxinfer.server.http_server import HttpServer
from jaxinfer.server.response_store import StoredResponse
from jaxinfer.server.serving import Serving
from jaxinfer.server.settings import ServerSettings
from jaxinfer.server.shared_metrics import report
from jaxinfer.server.tracing import Tracing, open_tracing
from jaxinfer.weights.resolve import open_checkpoint

logger = logging.getLogger(__name__)

type Control = Link[FromServer, ToServer]

_REPORT_SECONDS = 1.0


def main() -> int:
    log_level, descriptor, inbox, outbox = sys.argv[1:]
    logging.basicConfig(
        level=log_level.upper(), format="%(levelname)s %(name)s: %(message)s", force=True
    )
    # A terminal's Ctrl-C and a service manager's SIGTERM reach the whole group; the supervisor says when to drain.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    exit_with_parent()
    decoder: msgspec.msgpack.Decoder[ToServer] = msgspec.msgpack.Decoder(ToServer)
    control: Control = Link(outbox, inbox, decoder)
    with socket.socket(fileno=int(descriptor)) as bound:
        try:
            return _run(control, bound)
        except (ValueError, OSError) as error:
            control.send(Failed(str(error), is_bad_input=True))
            return 2
        except Exception as error:
            logger.exception("The API server can't go on.")
            control.send(Failed(text_of(error)))
            return 1
        finally:
            control.close(linger=1.0)


def _run(control: Control, bound: socket.socket) -> int:
    start = control.receive()
    assert isinstance(start, StartServer)
    settings = unpack_settings(start.settings)
    with open_tracing(settings) as tracing:
        files = model_files(start.args)
        tokenizer = load_tokenizer(start.args, files)
        control.send(Loaded())
        cores = control.receive()
        if not isinstance(cores, Cores):
            return 0
        frontend = build_frontend(
            start.args, cores.ready.config, tokenizer, open_checkpoint(files), f"@{start.client}"
        )
        links = _CoreLinks(start, cores)
        num_blocks = [cores.ready.num_blocks] * len(cores.inboxes)
        llm = AsyncLLM.from_client(frontend, links.connect, num_blocks)
        try:
            _ApiServer(control, settings, start.listen, llm, links, tracing).run(bound)
        finally:
            llm.shutdown()
    return 0


class _CoreLinks:
    """This process's ends of the wires to all cores."""

    def __init__(self, start: StartServer, cores: Cores) -> None:
        self._start = start
        self._cores = cores
        self._numbers = itertools.count()
        self._attached: list[AttachedCore | None] = [None] * len(cores.inboxes)
        self.group: CoreGroup | None = None

    def connect(self, on_outputs: Callable[[EngineCoreOutputs], None]) -> CoreGroup:
        ready = self._cores.ready
        balancer = load_balancer(ready.config, self._start.listen.data_parallel_routing)
        connects = [
            None if inbox is None else self._attach(core, ready, inbox)
            for core, inbox in enumerate(self._cores.inboxes)
        ]
        self.group = CoreGroup(connects, balancer, on_outputs)
        return self.group

    def _attach(self, core: int, ready: Ready, inbox: str) -> ConnectCore:
        address = f"ipc://{self._start.directory}/core-{core}-{next(self._numbers)}"
        attached = self._attached[core] = AttachedCore(inbox, address, self._start.client)
        return partial(ProcessClient, attached, ready, client=self._start.client)

    def down(self, core: int, cause: str) -> None:
        if (attached := self._attached[core]) is not None:
            attached.end(cause)

    def up(self, message: CoreUp) -> None:
        assert self.group is not None
        connect = self._attach(message.core, message.ready, message.inbox)
        self.group.replace(message.core, connect)


class _ApiServer:
    """Serves until the supervisor says `Drain`. Everything but what concerns the cores happens in the event loop."""

    def __init__(
        self,
        control: Control,
        settings: ServerSettings,
        listen: ListenArgs,
        llm: AsyncLLM,
        links: _CoreLinks,
        tracing: Tracing | None,
    ) -> None:
        self._control = control
        self._llm = llm
        self._links = links
        self._asked: dict[int, asyncio.Future[Answer | Kept]] = {}
        self._numbers = itertools.count(1)
        self._thread: threading.Thread | None = None
        llm.metrics.on_slept = lambda level: control.send(Slept(level))
        group = links.group
        assert group is not None
        self._serving = Serving(llm, settings, num_elsewhere=lambda: group.num_unfinished)
        asyncio.run(self._serving.load_adapters())
        self._serving.adapters.on_change = lambda name, path: control.send(Served(name, path))
        app = build_app(
            llm, settings, tracing=tracing, serving=self._serving, numbers=self, stored=self
        )
        self._server = HttpServer(
            app,
            listen,
            lambda: control.send(Listening()),
            handle_signals=False,
        )
        self._server.background += [self._listen, self._report]

    def run(self, bound: socket.socket) -> None:
        factory = self._server.config.get_loop_factory()
        try:
            with asyncio.Runner(loop_factory=factory) as runner:
                runner.run(self._server.serve([bound]))
        finally:
            self._control.end()
            if self._thread is not None:
                self._thread.join()

    async def metrics(self) -> bytes:
        return (await self._numbers_of_all()).metrics

    async def num_active(self) -> int:
        return (await self._numbers_of_all()).num_active

    async def counts(self) -> Sequence[Metric]:
        found = (await self._numbers_of_all(counts=True)).counts
        assert found is not None
        return [*found.counters, *found.vectors, *found.histograms]

    async def _numbers_of_all(self, counts: bool = False) -> Answer:
        answer = await self._ask(lambda number: Ask(number, counts))
        assert isinstance(answer, Answer)
        return answer

    async def keep(self, id: str, stored: StoredResponse) -> None:
        await self._ask(lambda number: Keep(number, id, stored))

    async def get(self, id: str) -> StoredResponse | None:
        answer = await self._ask(lambda number: Find(number, id))
        assert isinstance(answer, Kept)
        return answer.response

    async def remove(self, id: str) -> bool:
        answer = await self._ask(lambda number: Forget(number, id))
        assert isinstance(answer, Kept)
        return answer.was_there

    async def _ask(self, make: Callable[[int], FromServer]) -> Answer | Kept:
        """What the supervisor says to the message of this number."""
        number = next(self._numbers)
        answer = self._asked[number] = asyncio.get_running_loop().create_future()
        try:
            self._control.send(make(number))
            return await answer
        finally:
            del self._asked[number]

    async def _listen(self) -> None:
        loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._receive, args=(loop,), daemon=True)
        self._thread.start()

    def _receive(self, loop: asyncio.AbstractEventLoop) -> None:
        while (message := self._control.receive()) is not None:
            if isinstance(message, CoreDown):
                self._links.down(message.core, message.cause)
            elif isinstance(message, CoreUp):
                self._links.up(message)
            else:
                with contextlib.suppress(RuntimeError):  # the loop has ended
                    loop.call_soon_threadsafe(self._handle, message)

    def _handle(self, message: ToServer) -> None:
        if isinstance(message, Collect):
            self._send_report(message.number)
        elif isinstance(message, Answer | Kept):
            if (asked := self._asked.get(message.number)) is not None and not asked.done():
                asked.set_result(message)
        elif isinstance(message, Served):
            self._serving.adapters.heard(message.name, message.path)
        elif isinstance(message, Drain):
            self._server.handle_exit(message.signal, None)
        elif isinstance(message, Leave):
            self._server.should_exit = self._server.force_exit = True

    async def _report(self) -> None:
        """What the supervisor has to go by, should this process die."""
        while True:
            await asyncio.sleep(_REPORT_SECONDS)
            self._send_report(0)

    def _send_report(self, number: int) -> None:
        snapshot = self._llm.metrics.snapshot()
        self._control.send(report(number, self._serving.num_active, snapshot))


if __name__ == "__main__":
    sys.exit(main())
