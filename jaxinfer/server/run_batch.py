"""`jaxinfer run-batch`: the requests of an OpenAI batch file, answered by the endpoints themselves, without a socket."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO
from uuid import uuid4

from starlette.types import ASGIApp, Message
from tqdm import tqdm

from jaxinfer.async_llm import AsyncLLM
from jaxinfer.server.app import build_app
from jaxinfer.server.errors import encode_json
from jaxinfer.server.serving import Serving
from jaxinfer.server.settings import ServerSettings

URLS = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/embeddings",
    "/v1/score",
    "/v1/rerank",
    "/v2/rerank",
    "/pooling",
    "/classify",
    "/score",
    "/rerank",
)


@dataclass(slots=True)
class BatchCounts:
    """`num_failed` of the `num_requests` lines were refused or ended with an error."""

    num_requests: int = 0
    num_failed: int = 0


@dataclass(frozen=True, slots=True)
class _Request:
    custom_id: str
    url: str
    body: dict[str, Any]


class _BadLine(ValueError):
    def __init__(self, message: str, custom_id: str | None = None) -> None:
        super().__init__(message)
        self.custom_id = custom_id


async def run_batch(
    llm: AsyncLLM,
    settings: ServerSettings,
    source: Path,
    target: Path,
    max_concurrency: int | None = None,
    *,
    show_progress: bool = False,
) -> BatchCounts:
    """Answer every line of `source` with a line in `target`, in the order in which answers come.

    At most `max_concurrency` lines are under way (default: twice what the engine runs at once). A line that is no
    request has an answer that says why. Raises `OSError` for files that can't be read or written, `ValueError` for
    adapters that don't fit the model, `EngineDeadError` when the engine has died, after all lines have been answered.
    """
    serving = Serving(llm, settings)
    await serving.load_adapters()
    app = build_app(llm, settings, serving=serving)
    counts = BatchCounts()
    free = asyncio.Semaphore(max_concurrency or 2 * llm.config.scheduler.max_num_seqs)
    with (
        source.open(encoding="utf-8", errors="surrogateescape") as lines,
        target.open("w", encoding="utf-8") as answers,
        tqdm(unit="request", disable=not show_progress) as progress,
    ):

        async def answer(request: _Request | _BadLine) -> None:
            try:
                written = await _answer(app, request)
            finally:
                free.release()
            counts.num_failed += _has_failed(written)
            _write(answers, written)
            progress.update()

        async with asyncio.TaskGroup() as group:
            for request in _requests(lines):
                await free.acquire()
                counts.num_requests += 1
                group.create_task(answer(request))
    llm.check_health()
    return counts


def _requests(lines: Iterable[str]) -> Iterator[_Request | _BadLine]:
    seen: dict[str, int] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            request = _request(line)
            if request.custom_id in seen:
                raise _BadLine(
                    f"custom_id {request.custom_id!r} is that of line {seen[request.custom_id]} too.",
                    request.custom_id,
                )
            seen[request.custom_id] = number
            yield request
        except _BadLine as error:
            yield _BadLine(f"line {number}: {error}", error.custom_id)


def _request(line: str) -> _Request:
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise _BadLine(f"no valid JSON: {error}") from None
    if not isinstance(fields, dict):
        raise _BadLine("must be a JSON object.")
    custom_id, body = fields.get("custom_id"), fields.get("body")
    if not isinstance(custom_id, str):
        raise _BadLine(f"custom_id must be a string, got {custom_id!r:.100}.")
    if fields.get("method", "POST") != "POST":
        raise _BadLine(f"method must be POST, got {fields['method']!r:.100}.", custom_id)
    if fields.get("url") not in URLS:
        raise _BadLine(
            f"url must be one of {', '.join(URLS)}, got {fields.get('url')!r:.100}.", custom_id
        )
    if not isinstance(body, dict):
        raise _BadLine(f"body must be a JSON object, got {body!r:.100}.", custom_id)
    if body.get("stream"):
        raise _BadLine("stream: a batch has no streams.", custom_id)
    return _Request(custom_id, fields["url"], body)


async def _answer(app: ASGIApp, request: _Request | _BadLine) -> dict[str, Any]:
    answer: dict[str, Any] = {
        "id": f"batch_req_{uuid4().hex}",
        "custom_id": request.custom_id,
        "response": None,
        "error": None,
    }
    if isinstance(request, _BadLine):
        answer["error"] = {"code": "invalid_line", "message": str(request)}
        return answer
    status, body = await _post(app, request.url, encode_json(request.body))
    answer["response"] = {
        "status_code": status,
        "request_id": f"req_{uuid4().hex}",
        "body": json.loads(body),
    }
    return answer


def _has_failed(answer: dict[str, Any]) -> bool:
    return answer["error"] is not None or answer["response"]["status_code"] != 200


def _write(answers: TextIO, answer: dict[str, Any]) -> None:
    # ASCII, as texts may hold lone surrogates.
    answers.write(json.dumps(answer) + "\n")
    answers.flush()


async def _post(app: ASGIApp, path: str, body: bytes) -> tuple[int, bytes]:
    """Status and body of the application's answer."""
    status, parts, is_sent = 0, [], False

    async def receive() -> Message:
        nonlocal is_sent
        if is_sent:
            await asyncio.Event().wait()  # nobody disconnects
        is_sent = True
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: Message) -> None:
        nonlocal status
        if message["type"] == "http.response.start":
            status = message["status"]
        else:
            parts.append(message.get("body", b""))

    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "query_string": b"",
        "headers": [(b"content-type", b"application/json")],
        "client": None,
        "server": None,
    }
    await app(scope, receive, send)
    return status, b"".join(parts)
