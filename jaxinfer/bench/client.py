"""A streaming client of the OpenAI API that notes when each piece of an answer arrives."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Mapping
from typing import Any

import httpx

from jaxinfer.bench.datasets import BenchRequest
from jaxinfer.bench.timeline import Timeline

_TIMEOUT_SECONDS = 6 * 3600.0


def http_client(base_url: str, headers: Mapping[str, str]) -> httpx.AsyncClient:
    """As many connections as requests run at once; none is refused or waited for. No proxy stands between."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    return httpx.AsyncClient(
        base_url=base_url,
        headers=dict(headers),
        limits=limits,
        timeout=_TIMEOUT_SECONDS,
        trust_env=False,
    )


class StreamingClient:
    """`fields` go into every request's body."""

    def __init__(
        self, http: httpx.AsyncClient, endpoint: str, model: str, fields: Mapping[str, Any]
    ) -> None:
        self._http = http
        self._endpoint = endpoint
        self._is_chat = endpoint.endswith("/chat/completions")
        self._fields = {
            "model": model,
            "stream": True,
            "stream_options": {"include_usage": True},
            **fields,
        }

    async def send(self, request: BenchRequest) -> Timeline:
        """Never raises for a request that fails: its timeline says so."""
        timeline = Timeline(time.perf_counter(), request.num_prompt_tokens)
        body = json.dumps(self._fields | self._prompt(request)).encode()
        timeline.start = time.perf_counter()
        headers = {"content-type": "application/json"}
        try:
            async with self._http.stream(
                "POST", self._endpoint, content=body, headers=headers
            ) as response:
                if response.status_code != 200:
                    text = (await response.aread()).decode(errors="replace")
                    timeline.error = f"HTTP {response.status_code}: {text}"
                    return timeline
                await self._read(response, timeline)
        except (
            httpx.HTTPError,
            OSError,
            ValueError,
            LookupError,
            TypeError,
            AttributeError,
        ) as error:
            # The last ones are answers of another shape than OpenAI's.
            timeline.error = f"{type(error).__name__}: {error}"
        return timeline

    def _prompt(self, request: BenchRequest) -> dict[str, Any]:
        if self._is_chat:
            messages = [{"role": "user", "content": request.prompt}]
            return {"messages": messages, "max_completion_tokens": request.max_tokens}
        return {"prompt": request.prompt, "max_tokens": request.max_tokens}

    async def _read(self, response: httpx.Response, timeline: Timeline) -> None:
        is_complete = False
        async for event in _events(response):
            now = time.perf_counter()
            if event == "[DONE]":
                is_complete = True
                break
            chunk = json.loads(event)
            if error := chunk.get("error"):
                timeline.error = str(error.get("message") if isinstance(error, dict) else error)
                return
            if usage := chunk.get("usage"):
                timeline.num_prompt_tokens = usage["prompt_tokens"]
                timeline.num_output_tokens = usage["completion_tokens"]
            if (choices := chunk.get("choices")) and (piece := self._piece(choices[0])) is not None:
                timeline.token_times.append(now)
                timeline.text += piece
        if not is_complete:
            timeline.error = "The stream broke off."
        elif not timeline.token_times:
            timeline.error = "The stream held no token."

    def _piece(self, choice: dict[str, Any]) -> str | None:
        """The text of a chunk; None for the one that only says who speaks, which no token stands behind."""
        if not self._is_chat:
            return choice.get("text") or ""
        delta = choice.get("delta") or {}
        text = delta.get("content") or delta.get("reasoning") or ""
        if "role" in delta and not text and choice.get("finish_reason") is None:
            return None
        return text


async def _events(response: httpx.Response) -> AsyncIterator[str]:
    """The data of server-sent events, each of one line, as they come."""
    rest = b""
    async for part in response.aiter_bytes():
        *lines, rest = (rest + part).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield line[5:].strip().decode()
