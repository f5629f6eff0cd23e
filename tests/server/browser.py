"""Headless Chromium, where there is one, and servers that it can reach."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from jaxinfer.server.args import ListenArgs
from jaxinfer.server.http_server import HttpServer, bind

PROGRAMS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
LIMIT_MS = 60_000


def find_chromium() -> str:
    """Skips the test where none is installed. `$CHROMIUM` may name one."""
    found = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, PROGRAMS)), None)
    if found is None:
        pytest.skip("needs Chromium: apt-get install chromium, or name one in $CHROMIUM")
    return found


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api", reason="needs the package playwright")
    program = find_chromium()
    with playwright.sync_playwright() as started:
        try:
            browser = started.chromium.launch(executable_path=program, args=["--no-sandbox"])
        except playwright.Error as error:
            pytest.skip(f"{program} doesn't start: {str(error).splitlines()[0]}")
        yield browser
        browser.close()


@dataclass
class Served:
    """A server that listens at `url`, in a loop of its own."""

    url: str
    server: Any
    loop: asyncio.AbstractEventLoop

    def do[T](self, work: Awaitable[T]) -> T:
        """In the server's loop."""

        async def run() -> T:
            return await work

        return asyncio.run_coroutine_threadsafe(run(), self.loop).result(LIMIT_MS / 1000)


@contextmanager
def served(
    make: Callable[[], AbstractAsyncContextManager[Any]], log_level: str = "warning"
) -> Iterator[Served]:
    """What `make` opens, with its `app` on a free port of this machine."""
    ready = threading.Event()
    box: list[Served] = []
    stop: list[HttpServer] = []

    async def main() -> None:
        listen = ListenArgs(port=0, uvicorn_log_level=log_level)
        with contextlib.closing(bind(listen)) as bound:
            async with make() as server:
                http = HttpServer(server.app, listen, ready.set, handle_signals=False)
                url = f"http://127.0.0.1:{bound.getsockname()[1]}"
                box.append(Served(url, server, asyncio.get_running_loop()))
                stop.append(http)
                await http.serve([bound])

    thread = threading.Thread(target=lambda: asyncio.run(main()), daemon=True)
    thread.start()
    assert ready.wait(2 * LIMIT_MS / 1000)
    try:
        yield box[0]
    finally:
        stop[0].should_exit = stop[0].force_exit = True
        thread.join(LIMIT_MS / 1000)


@dataclass
class Tab:
    """A page that has loaded. `pictures`: the answers of `/anatomy` that it got; `errors`: what its console complained of,
    refused requests left out."""

    page: Any
    pictures: list[dict[str, Any]] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    def ask(self, text: str) -> None:
        self.page.fill("#message", text)
        self.page.press("#message", "Enter")

    def answer(self, number: int = 0) -> Any:
        """The text of an answer that is complete."""
        message = self.page.locator(".message.assistant").nth(number)
        message.locator(".buttons").wait_for(state="attached", timeout=LIMIT_MS)
        return message


@contextmanager
def tab(
    chromium: Any, url: str, *, width: int = 1300, height: int = 900, **more: Any
) -> Iterator[Tab]:
    context = chromium.new_context(viewport=dict(width=width, height=height), **more)
    context.set_default_timeout(LIMIT_MS)
    found = Tab(context.new_page())

    def on_console(message: Any) -> None:
        if message.type == "error" and "Failed to load resource" not in message.text:
            found.errors.append(message.text)

    def on_response(response: Any) -> None:
        if "/anatomy" in response.url and response.status == 200:
            found.pictures.append(response.json())

    found.page.on("console", on_console)
    found.page.on("pageerror", lambda error: found.errors.append(str(error)))
    found.page.on("response", on_response)
    found.page.goto(url)
    try:
        yield found
        assert not found.errors
    finally:
        context.close()
