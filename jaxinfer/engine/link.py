"""Messages to and from another process: two ZeroMQ sockets, and a pipe that says when nobody is there any more."""

from __future__ import annotations

import os
import threading

import msgspec
import zmq

_SLICE_SECONDS = 1.0


class Link[Sent, Received]:
    """msgpack, one message per frame. The other side binds `to_address`, this one `from_address`."""

    def __init__(
        self, to_address: str, from_address: str, decoder: msgspec.msgpack.Decoder[Received]
    ) -> None:
        self._context = zmq.Context[zmq.Socket[bytes]]()
        self._to = self._context.socket(zmq.PUSH)
        self._from = self._context.socket(zmq.PULL)
        for socket in (self._to, self._from):
            # Nothing may be lost or block: the scheduler's queue is where requests wait.
            socket.set_hwm(0)
        self._from.bind(from_address)
        # The side that connects can send at once, and after the other one's death; one that binds would block.
        self._to.connect(to_address)
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = decoder
        self._lock = threading.Lock()
        self._ended, self._end = os.pipe()
        self._poller = zmq.Poller()
        self._poller.register(self._from, zmq.POLLIN)
        self._poller.register(self._ended, zmq.POLLIN)

    def send(self, message: Sent) -> None:
        """Thread-safe; never blocks."""
        with self._lock:
            if not self._to.closed:
                self._to.send(self._encoder.encode(message))

    def receive(self, limit: float | None = None) -> Received | None:
        """The next message; None when the other side has ended and everything it said was read. Raises `TimeoutError`
        after `limit` seconds of silence, in which time that this process was itself stopped hardly counts. One thread
        at a time."""
        part = None if limit is None else min(limit / 4, _SLICE_SECONDS)
        silent = 0.0
        while True:
            ready = dict(self._poller.poll(None if part is None else int(1000 * part)))
            if self._from in ready:
                return self._decoder.decode(self._from.recv())
            if self._ended in ready:
                # What it sent last may still be on its way through ZeroMQ's own thread.
                return self._decoder.decode(self._from.recv()) if self._from.poll(100) else None
            if part is not None and limit is not None:
                silent += part
                if silent >= limit:
                    raise TimeoutError

    def end(self) -> None:
        """Makes the other side's end something that can be polled. Once, from any thread."""
        os.write(self._end, b"x")

    def close(self, linger: float = 0.0) -> None:
        """After the thread that receives has ended, and whoever calls `end`. May be called again. What was sent last has
        `linger` seconds to leave."""
        with self._lock:
            if self._to.closed:
                return
            self._to.close(int(1000 * linger))
        self._from.close(0)
        self._context.term()
        os.close(self._ended)
        os.close(self._end)
