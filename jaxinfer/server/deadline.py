"""A request's `timeout`: how long the client is ready to wait for the whole answer."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Sequence
from http import HTTPStatus
from typing import Protocol

from fastapi import Request

from jaxinfer.request_stream import RequestStream
from jaxinfer.server.errors import ApiError, BadRequest
from jaxinfer.server.serving import close

TIMEOUT_HEADER = "x-request-timeout"


class HasTimeout(Protocol):
    @property
    def timeout(self) -> float | None: ...


class Deadline:
    """Counts from its creation. `timeout` seconds, or None for as long as it takes."""

    def __init__(self, timeout: float | None) -> None:
        self._timeout = timeout
        loop = asyncio.get_running_loop()
        self._at = None if timeout is None else loop.time() + timeout

    @classmethod
    def of(cls, http: Request, request: HasTimeout) -> Deadline:
        """The request's `timeout`, or that of its header. Raises `BadRequest` for what is no time to wait."""
        timeout: float | None = request.timeout
        if timeout is None and (header := http.headers.get(TIMEOUT_HEADER)) is not None:
            try:
                timeout = float(header)
            except ValueError:
                raise BadRequest(
                    f"{TIMEOUT_HEADER} must be a number of seconds, got {header!r:.100}."
                ) from None
        if timeout is not None and not 0 < timeout < math.inf:
            raise BadRequest(
                f"timeout must be a number of seconds greater than 0, got {timeout}.",
                param="timeout",
            )
        return cls(timeout)

    async def wait[T](self, work: Awaitable[T]) -> T:
        """The result of `work`, which is cancelled when the time is over; that raises an `ApiError`."""
        try:
            async with asyncio.timeout_at(self._at) as limit:
                return await work
        except TimeoutError:
            if limit.expired():
                raise self._error() from None
            raise

    def watch(self, streams: Sequence[RequestStream]) -> Callable[[], None]:
        """When the time is over, those of `streams` that still run are aborted, also while their client doesn't read,
        and whoever reads them gets an `ApiError`. To be called when they are done with: closes them."""
        if self._at is None:
            return lambda: close(streams)
        timer = asyncio.get_running_loop().call_at(self._at, self._expire, streams)

        def finish() -> None:
            timer.cancel()
            close(streams)

        return finish

    def _expire(self, streams: Sequence[RequestStream]) -> None:
        for stream in streams:
            if stream.is_running:
                stream.fail(self._error())
                stream.close()

    def _error(self) -> ApiError:
        return ApiError(
            HTTPStatus.GATEWAY_TIMEOUT,
            f"The request took longer than its timeout of {self._timeout:g} seconds, and was aborted.",
            kind="timeout_error",
            param="timeout",
            # OpenAI's clients would send it again.
            headers={"x-should-retry": "false"},
        )
