"""A bare HTTP/1.1 client: cheap enough to share a machine with the server that it measures, and able to behave badly.

Bytes are kept with the time at which they came and read afterwards. Every request has a connection of its own, which the
server closes behind the answer.
"""

from __future__ import annotations

import asyncio
import json
import re
import socket
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

COMPLETIONS = "/v1/completions"
_SMALL_BUFFER = 4096


@dataclass(frozen=True)
class Address:
    host: str
    port: int


class Call(asyncio.Protocol):
    """One request and its answer. `ended` is set when the connection is closed, by whichever side.

    `on_data` hears of each arrival, with the number of them.
    """

    def __init__(self, request: bytes, on_data: Callable[[Call, int], None] | None = None) -> None:
        self._request = request
        self._on_data = on_data
        self.parts: list[bytes] = []
        self.times: list[float] = []
        self.start = 0.0
        self.end = 0.0
        self.error: Exception | None = None
        self.ended = asyncio.Event()
        self.transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self.start = time.perf_counter()
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self.times.append(time.perf_counter())
        self.parts.append(data)
        if self._on_data is not None:
            self._on_data(self, len(self.parts))

    def connection_lost(self, error: Exception | None) -> None:
        self.end = time.perf_counter()
        self.error = error
        self.ended.set()

    def hang_up(self, reset: bool) -> None:
        """Close the connection, or break it off with a TCP reset."""
        if reset:
            linger = struct.pack("ii", 1, 0)
            sock = self.transport.get_extra_info("socket")
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        self.transport.abort()

    @property
    def answer(self) -> Answer:
        return Answer.parse(b"".join(self.parts))


@dataclass(frozen=True)
class Answer:
    """`status` is 0 when there was no whole head."""

    status: int
    headers: dict[str, str]
    body: bytes

    @classmethod
    def parse(cls, data: bytes) -> Answer:
        head, found, body = data.partition(b"\r\n\r\n")
        if not found:
            return cls(0, {}, data)
        first, *lines = head.decode("latin-1").split("\r\n")
        pairs = (line.partition(":") for line in lines)
        headers = {name.lower(): value.strip() for name, _, value in pairs}
        if headers.get("transfer-encoding") == "chunked":
            body = _without_chunks(body)
        return cls(int(first.split()[1]), headers, body)

    def events(self) -> list[dict[str, Any] | None]:
        """Server-sent events as JSON; None for the `[DONE]` that should be the last one."""
        parts = [part for part in self.body.decode().split("\n\n") if part]
        datas = [part.removeprefix("data: ") for part in parts]
        return [None if data == "[DONE]" else json.loads(data) for data in datas]


def _without_chunks(data: bytes) -> bytes:
    """Of what arrived, which may end anywhere."""
    body, at = [], 0
    while (end := data.find(b"\r\n", at)) >= 0:
        size = int(data[at:end], 16)
        body.append(data[end + 2 : end + 2 + size])
        at = end + 2 + size + 2
    return b"".join(body)


def http_request(address: Address, path: str, body: dict[str, Any] | None = None) -> bytes:
    """A POST of JSON, or without a body a GET."""
    content = b"" if body is None else json.dumps(body).encode()
    lines = [
        f"{'GET' if body is None else 'POST'} {path} HTTP/1.1",
        f"Host: {address.host}:{address.port}",
        "Connection: close",
        "Content-Type: application/json",
        f"Content-Length: {len(content)}",
    ]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + content


async def open_call(
    address: Address,
    request: bytes,
    on_data: Callable[[Call, int], None] | None = None,
    *,
    small_buffer: bool = False,
) -> Call:
    """`small_buffer`: the kernel takes little for who doesn't read."""
    sock = socket.socket()
    sock.setblocking(False)
    if small_buffer:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _SMALL_BUFFER)
    loop = asyncio.get_running_loop()
    try:
        await loop.sock_connect(sock, (address.host, address.port))
        _, call = await loop.create_connection(lambda: Call(request, on_data), sock=sock)
    except BaseException:
        sock.close()
        raise
    return call


async def ask(
    address: Address, path: str, body: dict[str, Any] | None = None, limit: float = 600.0
) -> Call:
    """The whole exchange. Raises `TimeoutError` after `limit` seconds and `OSError` when nobody listens."""
    call = await open_call(address, http_request(address, path, body))
    async with asyncio.timeout(limit):
        await call.ended.wait()
    return call


async def read_metrics(address: Address) -> dict[str, float]:
    """What `/metrics` says, by name without the prefix, summed over everything but `finished_reason`."""
    text = (await ask(address, "/metrics", limit=30)).answer.body.decode()
    values: dict[str, float] = {}
    for name, labels, value in re.findall(r"^\w+:(\w+)(\{.*\})? (\S+)$", text, re.MULTILINE):
        reason = re.search(r'finished_reason="(\w+)"', labels)
        if 'le="' not in labels:
            key = name if reason is None else f"{name}.{reason[1]}"
            values[key] = values.get(key, 0.0) + float(value)
    return values
