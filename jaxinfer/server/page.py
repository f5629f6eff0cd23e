"""The page at `/`: files of this package, which need nothing from anywhere else."""

from __future__ import annotations

import hashlib
from http import HTTPStatus
from importlib.resources import files
from pathlib import PurePath

from fastapi import APIRouter, Request, Response

from jaxinfer.server.errors import ApiError

_INDEX = "index.html"
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
# Scripts and styles come from these files alone, and no text ever becomes markup.
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'"
)
_HEADERS = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    # Browsers keep them, and ask each time whether they are still the server's.
    "Cache-Control": "no-cache",
}


def router() -> APIRouter:
    routes = APIRouter()
    folder = files("jaxinfer.server") / "page_files"
    contents = {file.name: file.read_bytes() for file in folder.iterdir() if file.is_file()}
    tags = {name: f'"{hashlib.sha256(text).hexdigest()[:32]}"' for name, text in contents.items()}

    def answer(name: str, request: Request) -> Response:
        if name not in contents:
            raise ApiError(HTTPStatus.NOT_FOUND, "Not Found", kind="not_found_error")
        headers = _HEADERS | {"ETag": tags[name]}
        known = request.headers.get("if-none-match", "")
        if tags[name] in (tag.strip().removeprefix("W/") for tag in known.split(",")):
            return Response(status_code=HTTPStatus.NOT_MODIFIED, headers=headers)
        media_type = _TYPES[PurePath(name).suffix]
        return Response(contents[name], headers=headers, media_type=media_type)

    @routes.api_route("/", methods=["GET", "HEAD"], include_in_schema=False)
    async def index(request: Request) -> Response:
        return answer(_INDEX, request)

    @routes.api_route("/page/{name}", methods=["GET", "HEAD"], include_in_schema=False)
    async def file(name: str, request: Request) -> Response:
        return answer(name, request)

    return routes
