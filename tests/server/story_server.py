"""The HTTP application over the story engine, in this process and without a socket."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx

from jaxinfer.async_llm import AsyncLLM
from jaxinfer.engine.core import EngineCore
from jaxinfer.server.app import build_app
from jaxinfer.server.settings import ServerSettings
from tests.engine.fake_executor import FakeExecutor
from tests.frontend.story_engine import story_engine

MODEL = "story"
LIMIT = 20.0
"""Seconds after which a test gives up."""


@dataclass
class StoryServer:
    http: httpx.AsyncClient
    app: Any
    llm: AsyncLLM
    core: EngineCore
    executor: FakeExecutor

    async def post(self, path: str, **body: Any) -> httpx.Response:
        headers = {"content-type": "application/json"}
        return await self.http.post(path, content=json.dumps(body), headers=headers)

    async def ok(self, path: str, **body: Any) -> dict[str, Any]:
        response = await self.post(path, **body)
        assert response.status_code == 200, response.text
        return response.json()

    async def refused(self, path: str, status: int = 400, **body: Any) -> dict[str, Any]:
        """The error; every one has OpenAI's four fields."""
        response = await self.post(path, **body)
        assert response.status_code == status, response.text
        return error_of(response)

    async def events(self, path: str, **body: Any) -> list[dict[str, Any]]:
        response = await self.post(path, stream=True, **body)
        assert response.status_code == 200, response.text
        assert response.headers["content-type"].startswith("text/event-stream")
        return parse_events(response.text)

    async def metric(self, line: str) -> float:
        text = (await self.http.get("/metrics")).text
        return next(
            float(found.rsplit(" ", 1)[1]) for found in text.splitlines() if found.startswith(line)
        )

    async def until_idle(self) -> None:
        """An abort travels to the engine's thread."""
        async with asyncio.timeout(LIMIT):
            while self.core.scheduler.requests or self.llm.num_unfinished:
                await asyncio.sleep(0)

    @property
    def num_free_blocks(self) -> int:
        return self.core.scheduler.kv.pool.num_free


def error_of(response: httpx.Response) -> dict[str, Any]:
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] in (response.status_code, "context_length_exceeded") and error["message"]
    return error


def parse_events(text: str) -> list[dict[str, Any]]:
    """Without the `[DONE]` that ends them."""
    events = [part.removeprefix("data: ") for part in text.split("\n\n") if part]
    assert events.pop() == "[DONE]"
    return [json.loads(event) for event in events]


@asynccontextmanager
async def story_server(
    settings: dict[str, Any] | None = None, root_path: str = "", **engine_args: Any
) -> AsyncIterator[StoryServer]:
    engine, executor = story_engine(**engine_args)
    llm = AsyncLLM.from_engine(engine)
    names = ServerSettings(**{"served_model_name": (MODEL, "tale"), **(settings or {})})
    app = build_app(llm, names)
    transport = httpx.ASGITransport(app, raise_app_exceptions=False, root_path=root_path)
    async with httpx.AsyncClient(transport=transport, base_url="http://story", timeout=60) as http:
        try:
            yield StoryServer(http, app, llm, engine.core, executor)
        finally:
            llm.shutdown()


def run(
    test: Callable[[StoryServer], Awaitable[Any]],
    settings: dict[str, Any] | None = None,
    **engine_args: Any,
) -> Any:
    """The test's result, with a server of its own."""

    async def use() -> Any:
        async with story_server(settings, **engine_args) as server:
            return await test(server)

    return asyncio.run(use())
