"""The engine core's side of two processes: reads requests from one socket, steps, writes outputs to the others."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import msgspec
import zmq

from jaxinfer.engine.child_process import exit_with_parent, text_of
from jaxinfer.engine.core import EngineCore
from jaxinfer.engine.core_clients import CoreClients
from jaxinfer.engine.ipc import (
    OWNER,
    Abort,
    Add,
    Attach,
    Beat,
    Call,
    Detach,
    Died,
    Pause,
    Ready,
    Returned,
    Start,
    Stop,
    ToCore,
)
from jaxinfer.engine.messages import EngineCoreOutputs, FinishedRequest, FinishReason
from jaxinfer.engine_args import EngineArgs

logger = logging.getLogger(__name__)

_BUSY_BEAT_SECONDS = 0.1
"""How old a report of the load gets while there is work."""


def run_core(
    inbox_address: str, outbox_address: str, build: Callable[[EngineArgs], EngineCore]
) -> int:
    """Serve until told to stop or a step fails; returns the process's exit code.

    The parent's death is seen at stdin, a pipe that nobody writes to.
    """
    exit_with_parent()
    context = zmq.Context()
    inbox = context.socket(zmq.PULL)
    inbox.set_hwm(0)
    inbox.bind(inbox_address)
    try:
        return _CoreLoop(inbox, CoreClients(context, outbox_address)).run(build)
    finally:
        context.destroy(linger=1000)


class _CoreLoop:
    def __init__(self, inbox: zmq.Socket[bytes], clients: CoreClients) -> None:
        self._inbox = inbox
        self._clients = clients
        self._decoder: msgspec.msgpack.Decoder[ToCore] = msgspec.msgpack.Decoder(ToCore)
        self._beat_seconds = 1.0
        self._next_beat = 0.0
        self._idle_is_known = False

    def run(self, build: Callable[[EngineArgs], EngineCore]) -> int:
        start = self._receive(None)
        assert isinstance(start, Start)
        self._beat_seconds = start.beat_seconds
        try:
            core = build(start.args)
        except Exception as error:
            is_bad_input = isinstance(error, ValueError | OSError)
            logger.log(
                logging.DEBUG if is_bad_input else logging.ERROR,
                "The engine core can't start.",
                exc_info=error,
            )
            text = str(error) if is_bad_input else text_of(error)
            self._clients.send(OWNER, Died(text, is_bad_input))
            return 1
        core.on_compile(self._pause)
        self._clients.send(OWNER, Ready(core.config, core.num_blocks))
        try:
            while self._take_messages(core):
                self._clients.send_outputs(core.step())
                core.check_alive()
                if time.monotonic() >= self._next_beat:
                    self._beat(core)
        except Exception as error:
            self._clients.send(OWNER, Died(text_of(error)))
            return 1
        core.shutdown()
        return 0

    def _beat(self, core: EngineCore) -> None:
        load = core.load()
        for client, num_received in self._clients.num_received.items():
            self._clients.send(client, Beat(*load, num_received))
        self._idle_is_known = not core.has_unfinished()
        self._next_beat = time.monotonic() + min(_BUSY_BEAT_SECONDS, self._beat_seconds)

    def _pause(self) -> None:
        self._clients.send(OWNER, Pause())

    def _take_messages(self, core: EngineCore) -> bool:
        """Pass on what has arrived, waiting for it when there is nothing else to do. False: stop."""
        while True:
            is_idle = not core.has_unfinished()
            if is_idle and not self._idle_is_known:
                self._beat(core)
            message = self._receive(self._beat_seconds if is_idle else 0.0)
            if message is None:
                if not is_idle:
                    return True
                self._beat(core)
            elif isinstance(message, Add):
                self._add(core, message)
            elif isinstance(message, Abort):
                self._clients.forget(message.request_ids)
                core.abort_requests(message.request_ids)
            elif isinstance(message, Call):
                self._call(core, message)
            elif isinstance(message, Attach):
                self._clients.attach(message.client, message.address)
                self._beat(core)
            elif isinstance(message, Detach):
                core.abort_requests(self._clients.detach(message.client))
            else:
                return not isinstance(message, Stop)

    def _add(self, core: EngineCore, message: Add) -> None:
        """The sender has checked the request; a refusal here ends it alone."""
        self._idle_is_known = False
        request_id = message.request.request_id
        if not self._clients.expect(message.client, request_id):
            return
        try:
            core.add_request(message.request)
        except ValueError as error:
            end = FinishedRequest(request_id, FinishReason.ERROR, str(error), True)
            self._clients.send_outputs(EngineCoreOutputs(finished=[end]))

    def _call(self, core: EngineCore, call: Call) -> None:
        self._pause()
        try:
            answer = Returned(call.number, core.call(call.name, *call.arguments))
        except ValueError as error:
            answer = Returned(call.number, error=str(error))
        self._clients.send(call.client, answer)
        if call.client != OWNER:
            self._beat(core)

    def _receive(self, seconds: float | None) -> ToCore | None:
        """What has come within this time, or None; with None, waits for it."""
        if seconds and not self._inbox.poll(int(1000 * seconds)):
            return None
        try:
            return self._decoder.decode(self._inbox.recv(0 if seconds is None else zmq.NOBLOCK))
        except zmq.Again:
            return None
