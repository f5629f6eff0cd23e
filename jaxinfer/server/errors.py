"""Errors as OpenAI's clients expect them: a body with message, type, param and code."""

from __future__ import annotations

import json
import logging
import re
from http import HTTPStatus
from typing import Any

import msgspec
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.types import Scope

from jaxinfer.engine.errors import EngineDeadError, WrongRunner
from jaxinfer.outputs import RequestFailedError

logger = logging.getLogger(__name__)


class ErrorFields(BaseModel):
    message: str
    type: str
    param: str | None
    code: int | str


class ErrorBody(BaseModel):
    """The shape of `ApiError.body`, for the schema of the endpoints."""

    error: ErrorFields


ERROR_RESPONSES: dict[int | str, dict[str, Any]] = {
    "4XX": {"model": ErrorBody, "description": "The request is at fault"},
    "5XX": {"model": ErrorBody, "description": "The server is at fault, or can't answer now"},
}


class ApiError(Exception):
    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str,
        param: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.kind = kind
        self.param = param
        self.headers = headers
        self.code: int | str = status

    @property
    def body(self) -> dict[str, Any]:
        return {
            "error": {
                "message": self.message,
                "type": self.kind,
                "param": self.param,
                "code": self.code,
            }
        }

    @property
    def messages_body(self) -> dict[str, Any]:
        """As Anthropic's clients expect it."""
        other = "api_error" if self.status >= 500 else "invalid_request_error"
        kind = _MESSAGES_KINDS.get(self.status, other)
        return {"type": "error", "error": {"type": kind, "message": self.message}}

    def response(self, scope: Scope) -> Response:
        """In the form of the API that a request is for."""
        is_messages = api_path(scope).startswith("/v1/messages")
        body = self.messages_body if is_messages else self.body
        return json_response(body, self.status, self.headers)


def api_path(scope: Scope) -> str:
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", ""))


_MESSAGES_KINDS: dict[int, str] = {
    HTTPStatus.UNAUTHORIZED: "authentication_error",
    HTTPStatus.NOT_FOUND: "not_found_error",
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: "request_too_large",
    HTTPStatus.SERVICE_UNAVAILABLE: "overloaded_error",
    HTTPStatus.GATEWAY_TIMEOUT: "timeout_error",
}


class BadRequest(ApiError):
    """`param`: the field at fault, where one is."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(HTTPStatus.BAD_REQUEST, message, kind="invalid_request_error", param=param)


class ContextExceeded(BadRequest):
    """The prompt, or with `limit` what it and an output of that many tokens would be, is longer than the context.
    Clients find out by code and words of both APIs, which they have to compact the conversation for, or to try again
    with a lower limit."""

    def __init__(self, num_prompt: int, max_len: int, param: str, limit: int | None = None) -> None:
        most = f"This model's maximum context length is {max_len} tokens"
        if limit is None:
            message = f"{most}, and the prompt is too long: it has {num_prompt}, and one is for the output."
            self._for_messages = f"prompt is too long: {num_prompt} tokens > {max_len - 1} maximum"
        else:
            message = (
                f"{param} is too large: {limit}. {most}, and the prompt has {num_prompt} of them."
            )
            self._for_messages = (
                f"input length and `max_tokens` exceed context limit: {num_prompt} + {limit} > {max_len}, "
                "decrease input length or `max_tokens` and try again"
            )
        super().__init__(message, param)
        self.code = "context_length_exceeded"

    @property
    def messages_body(self) -> dict[str, Any]:
        error = {"type": "invalid_request_error", "message": self._for_messages}
        return {"type": "error", "error": error}


_encoder = msgspec.json.Encoder()


def encode_json(body: Any) -> bytes:
    try:
        return _encoder.encode(body)
    except UnicodeEncodeError:  # a client's lone surrogate, sent back to it
        return json.dumps(body).encode()


def json_response(
    body: Any, status: int = HTTPStatus.OK, headers: dict[str, str] | None = None
) -> Response:
    return Response(encode_json(body), status, headers=headers, media_type="application/json")


_NAME = re.compile(r"[a-z][a-z_0-9]*")


def from_value_error(error: ValueError, fields: Any) -> BadRequest:
    """Messages of the engine begin with the name of the parameter at fault; `fields` are those of the request."""
    match = _NAME.match(str(error))
    name = match[0] if match else ""
    name = {"prompt_token_ids": "prompt"}.get(name, name)
    return BadRequest(str(error), param=name if name in fields else None)


def to_api_error(error: BaseException) -> ApiError:
    """What to tell a client of anything that is raised while a request is served."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, EngineDeadError):
        return ApiError(HTTPStatus.SERVICE_UNAVAILABLE, str(error), kind="service_unavailable")
    if isinstance(error, RequestFailedError):
        message = "; ".join(error.failures.values())
        if error.is_refused:
            return BadRequest(message)
        return ApiError(HTTPStatus.INTERNAL_SERVER_ERROR, message, kind="internal_server_error")
    if isinstance(error, WrongRunner):
        return ApiError(HTTPStatus.NOT_FOUND, str(error), kind="not_found_error", param="model")
    if isinstance(error, ValueError):
        return BadRequest(str(error))
    logger.error("A request failed.", exc_info=error)
    return ApiError(
        HTTPStatus.INTERNAL_SERVER_ERROR,
        "The server failed to handle this request.",
        kind="internal_server_error",
    )


def install(app: FastAPI) -> None:
    async def known(request: Request, error: Exception) -> Response:
        return to_api_error(error).response(request.scope)

    async def invalid(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        is_body = error.errors()[0].get("loc", ())[:1] == ("body",)
        found = _unreadable_body(request, is_read=False) if is_body else None
        return (found or _validation_error(error)).response(request.scope)

    async def http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        status = HTTPStatus(error.status_code)
        if status == HTTPStatus.BAD_REQUEST and (found := _unreadable_body(request, is_read=True)):
            return found.response(request.scope)
        return ApiError(
            status,
            str(error.detail),
            kind=_KINDS.get(status, "invalid_request_error"),
            headers=dict(error.headers or {}),
        ).response(request.scope)

    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(HTTPException, http)
    for kind in (ApiError, EngineDeadError, RequestFailedError, WrongRunner):
        app.add_exception_handler(kind, known)
    app.add_exception_handler(Exception, known)


_KINDS = {
    HTTPStatus.NOT_FOUND: "not_found_error",
    HTTPStatus.INTERNAL_SERVER_ERROR: "internal_server_error",
}


def _unreadable_body(request: Request, is_read: bool) -> ApiError | None:
    """Why a body couldn't be understood, where its headers say so. `is_read`: it was taken for JSON."""
    coding = request.headers.get("content-encoding", "identity")
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if coding.lower() != "identity":
        message = f"Content-Encoding {coding!r:.100} is not supported: send the body as it is."
    elif not is_read and kind != "application/json" and not kind.endswith("+json"):
        message = f"Content-Type must be application/json, got {kind!r:.100}."
    else:
        return None
    return ApiError(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, message, kind="invalid_request_error")


def _validation_error(error: RequestValidationError) -> BadRequest:
    """Names the field, and of a union's complaints gives the first."""
    first = error.errors()[0]
    path = [part for part in first.get("loc", ()) if part != "body"]
    if first.get("type") == "json_invalid":
        return BadRequest(f"The body is no valid JSON: {first.get('ctx', {}).get('error', '')}.")
    names = [str(part) for part in path if isinstance(part, int) or _NAME.fullmatch(str(part))]
    where = ".".join(names)
    message = f"{where}: {first['msg']}" if where else str(first["msg"])
    return BadRequest(message, param=names[0] if names else None)
