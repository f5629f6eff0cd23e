"""Around every request: API keys, a limit on bodies, request ids, and a count of what is going on. Plain ASGI, as
Starlette's `BaseHTTPMiddleware` hides a client's disconnection from streams."""

from __future__ import annotations

import hmac
from collections.abc import Sequence
from http import HTTPStatus
from uuid import uuid4

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jaxinfer.server.anatomy import ANATOMY_PATH
from jaxinfer.server.errors import ApiError, api_path
from jaxinfer.server.serving import Serving


class ApiKeys:
    """`/v1` and `/anatomy` need one of the keys, as a bearer token or as Anthropic's clients give it, in `x-api-key`; everything else is open, for probes and scrapers."""

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        self._app = app
        self._keys = [key.encode() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] == "OPTIONS" or not _needs_key(scope):
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        scheme, _, token = headers.get("authorization", "").partition(" ")
        given = (token if scheme.lower() == "bearer" else headers.get("x-api-key", "")).encode()
        # Every key is compared, each in constant time, so that timing tells nothing.
        matches = [hmac.compare_digest(given, key) for key in self._keys]
        if any(matches):
            await self._app(scope, receive, send)
            return
        error = ApiError(
            HTTPStatus.UNAUTHORIZED,
            "Unauthorized: give one of the server's API keys as a bearer token.",
            kind="authentication_error",
            headers={"WWW-Authenticate": "Bearer"},
        )
        await error.response(scope)(scope, receive, send)


def _needs_key(scope: Scope) -> bool:
    return _is_api(scope) or api_path(scope) == ANATOMY_PATH


def _is_api(scope: Scope) -> bool:
    path = api_path(scope)
    return path == "/v1" or path.startswith("/v1/")


class BodyLimit:
    """413 for a body over `max_bytes`, before it is in memory."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        length = Headers(scope=scope).get("content-length", "")
        if length.isdigit() and int(length) > self._max_bytes:
            await self._error().response(scope)(scope, receive, send)
            return
        num_bytes = 0

        async def counted() -> Message:
            nonlocal num_bytes
            message = await receive()
            num_bytes += len(message.get("body", b""))
            if num_bytes > self._max_bytes:
                # FastAPI passes this on, and calls every other error of a body unreadable.
                error = self._error()
                raise HTTPException(error.status, error.message)
            return message

        await self._app(scope, counted, send)

    def _error(self) -> ApiError:
        return ApiError(
            HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
            f"The body has more than {self._max_bytes} bytes.",
            kind="invalid_request_error",
        )


class Heads:
    """HEAD is answered as GET is, without the body, which the HTTP server leaves out: monitors ask so."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "HEAD":
            scope = dict(scope, method="GET")
        await self._app(scope, receive, send)


class RequestIds:
    """Answers carry the request's `X-Request-Id`, or a new one."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = Headers(scope=scope).get("x-request-id")
        if request_id is None:
            # The endpoint names its answer by what it finds among the headers.
            request_id = uuid4().hex
            MutableHeaders(scope=scope)["x-request-id"] = request_id

        async def with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["x-request-id"] = request_id
            await send(message)

        await self._app(scope, receive, with_id)


class ActiveRequests:
    """Counts the requests to `/v1` that are being answered."""

    def __init__(self, app: ASGIApp, serving: Serving) -> None:
        self._app = app
        self._serving = serving

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not _is_api(scope):
            await self._app(scope, receive, send)
            return
        self._serving.num_active += 1
        try:
            await self._app(scope, receive, send)
        finally:
            self._serving.num_active -= 1
