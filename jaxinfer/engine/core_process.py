"""The engine core's side of two processes: reads requests from one socket, steps, writes outputs to the other."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from typing import NoReturn

import msgspec
import zmq

from jaxinfer.config import EngineArgs
from jaxinfer.engine.core import EngineCore
from jaxinfer.engine.ipc import (
    Abort,
    Add,
    Call,
    Died,
    FromCore,
    Outputs,
    Ready,
    Returned,
    Start,
    Stop,
    ToCore,
)
from jaxinfer.engine.messages import (
    EngineCoreOutputs,
    FinishedRequest,
    FinishReason,
)

logger = logging.getLogger(__name__)


def run_core(
    inbox_address: str, outbox_address: str, build: Callable[[EngineArgs], EngineCore]
) -> int:
    """Serve until told to stop or a step fails; returns the process's exit code.

    The parent's death is seen at stdin, a pipe that nobody writes to.
    """
    threading.Thread(target=_exit_with_parent, name="parent-watch", daemon=True).start()
    context = zmq.Context()
    inbox, outbox = context.socket(zmq.PULL), context.socket(zmq.PUSH)
    for socket in (inbox, outbox):
        socket.set_hwm(0)
    inbox.bind(inbox_address)
    outbox.connect(outbox_address)
    try:
        return _CoreLoop(inbox, outbox).run(build)
    finally:
        context.destroy(linger=1000)


def _exit_with_parent() -> NoReturn:
    # Not by way of `sys.stdin`, whose lock the interpreter wants when it exits.
    while os.read(0, 1):
        pass
    os._exit(1)


class _CoreLoop:
    def __init__(self, inbox: zmq.Socket[bytes], outbox: zmq.Socket[bytes]) -> None:
        self._inbox = inbox
        self._outbox = outbox
        self._decoder: msgspec.msgpack.Decoder[ToCore] = msgspec.msgpack.Decoder(ToCore)
        self._encoder = msgspec.msgpack.Encoder()
        self._last_ids: list[str] | None = None

    def run(self, build: Callable[[EngineArgs], EngineCore]) -> int:
        start = self._receive(wait=True)
        assert isinstance(start, Start)
        try:
            core = build(start.args)
        except Exception as error:
            is_bad_input = isinstance(error, ValueError | OSError)
            logger.log(
                logging.DEBUG if is_bad_input else logging.ERROR,
                "The engine core can't start.",
                exc_info=error,
            )
            self._send(Died(str(error) if is_bad_input else _text(error), is_bad_input))
            return 1
        self._send(Ready(core.config, core.num_blocks))
        try:
            while self._take_messages(core):
                self._send_outputs(core.step())
                core.check_alive()
        except Exception as error:
            self._send(Died(_text(error)))
            return 1
        core.shutdown()
        return 0

    def _take_messages(self, core: EngineCore) -> bool:
        """Pass on what has arrived, waiting for it when there is nothing else to do. False: stop."""
        while True:
            message = self._receive(wait=not core.has_unfinished())
            if message is None:
                return True
            if isinstance(message, Add):
                self._add(core, message)
            elif isinstance(message, Abort):
                core.abort_requests(message.request_ids)
            elif isinstance(message, Call):
                self._call(core, message)
            else:
                return not isinstance(message, Stop)

    def _add(self, core: EngineCore, message: Add) -> None:
        """The sender has checked the request; a refusal here ends it alone."""
        try:
            core.add_request(message.request)
        except ValueError as error:
            end = FinishedRequest(message.request.request_id, FinishReason.ERROR, str(error), True)
            self._send_outputs(EngineCoreOutputs(finished=[end]))

    def _call(self, core: EngineCore, call: Call) -> None:
        try:
            self._send(Returned(call.number, core.call(call.name, *call.arguments)))
        except ValueError as error:
            self._send(Returned(call.number, error=str(error)))

    def _receive(self, wait: bool) -> ToCore | None:
        try:
            return self._decoder.decode(self._inbox.recv(0 if wait else zmq.NOBLOCK))
        except zmq.Again:
            return None

    def _send_outputs(self, outputs: EngineCoreOutputs) -> None:
        if outputs.is_empty and outputs.stats is None:
            return
        ids = outputs.request_ids
        if ids and ids is self._last_ids:
            bare = msgspec.structs.replace(outputs, request_ids=[])
            self._send(Outputs(bare, same_ids=True))
            return
        self._last_ids = ids
        self._send(Outputs(outputs))

    def _send(self, message: FromCore) -> None:
        self._outbox.send(self._encoder.encode(message))


def _text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
