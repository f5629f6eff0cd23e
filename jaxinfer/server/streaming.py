"""Server-sent events: one JSON object per event, `[DONE]` at the end, and nothing computed for who has left."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any

from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from jaxinfer.server.errors import encode_json, to_api_error
from jaxinfer.server.serving import disconnected

type Chunks = AsyncGenerator[dict[str, Any]]

RESPONSES: dict[int | str, dict[str, Any]] = {
    200: {"content": {"application/json": {}, "text/event-stream": {}}}
}
"""For the schema of endpoints that stream when asked to."""
_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}


class EventStream(Response):
    """Sends each of `chunks` as an event, and an error in place of the rest when one is raised.

    A client that disconnects ends it at once, between chunks too. `on_close` is called however it ends. A client that
    reads slowly holds up its own stream only: what it misses comes as one chunk.
    """

    media_type = "text/event-stream"

    def __init__(self, chunks: Chunks, on_close: Callable[[], None]) -> None:
        super().__init__(headers=_HEADERS)
        del self.headers["content-length"]
        self._chunks = chunks
        self._on_close = on_close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sending = asyncio.ensure_future(self._send_all(send))
        leaving = asyncio.ensure_future(disconnected(receive))
        try:
            await asyncio.wait((sending, leaving), return_when=asyncio.FIRST_COMPLETED)
            if sending.done():
                await sending
        finally:
            leaving.cancel()
            if not sending.done():
                sending.cancel()
                await asyncio.wait((sending,))
            self._on_close()

    async def _send_all(self, send: Send) -> None:
        await send(
            {
                "type": "http.response.start",
                "status": self.status_code,
                "headers": self.raw_headers,
            }
        )
        async with aclosing(self._chunks):
            try:
                async for chunk in self._chunks:
                    await send(_event(encode_json(chunk)))
            except OSError:  # the client has left
                raise
            except Exception as error:
                await send(_event(encode_json(to_api_error(error).body)))
        await send(_event(b"[DONE]"))
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def _event(data: bytes) -> Message:
    return {"type": "http.response.body", "body": b"data: " + data + b"\n\n", "more_body": True}
