"""Server-sent events that have names, as the APIs do that came after chat completions: each chunk's `type`."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import aclosing
from typing import Any

from starlette.types import Send

from jaxinfer.server.errors import ApiError, encode_json, to_api_error
from jaxinfer.server.streaming import Chunks, EventStream


class NamedEventStream(EventStream):
    """`error_event` makes the last event of an error; nothing else marks the end."""

    def __init__(
        self,
        chunks: Chunks,
        on_close: Callable[[], None],
        error_event: Callable[[ApiError], dict[str, Any]],
    ) -> None:
        super().__init__(chunks, on_close)
        self._error_event = error_event

    async def _send_all(self, send: Send) -> None:
        start = {"type": "http.response.start", "status": self.status_code}
        await send(start | {"headers": self.raw_headers})
        async with aclosing(self._chunks):
            try:
                async for chunk in self._chunks:
                    await _send_event(send, chunk)
            except OSError:  # the client has left
                raise
            except Exception as error:
                await _send_event(send, self._error_event(to_api_error(error)))
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _send_event(send: Send, event: dict[str, Any]) -> None:
    body = b"event: %s\ndata: %s\n\n" % (event["type"].encode(), encode_json(event))
    await send({"type": "http.response.body", "body": body, "more_body": True})
