"""Clients that leave, and many at once. Spoken to as uvicorn does, since httpx's transport reads answers to their end."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import pytest

from tests.frontend.story_engine import continuation, tell
from tests.server.story_server import LIMIT, StoryServer, parse_events, run

TEXT = "/v1/completions"


class Client:
    """`leave_after` body chunks of the answer (0: once the request was read), or None: stay."""

    def __init__(self, body: dict[str, Any], leave_after: int | None = None) -> None:
        self._request = json.dumps(body).encode()
        self._leave_after = leave_after
        self._sent = False
        self._leaves = asyncio.Event()
        self.chunks: list[bytes] = []
        self.status: int | None = None

    async def receive(self) -> dict[str, Any]:
        if not self._sent:
            self._sent = True
            return {"type": "http.request", "body": self._request, "more_body": False}
        if self._leave_after != 0:
            await self._leaves.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: dict[str, Any]) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
        elif message.get("body"):
            self.chunks.append(message["body"])
            if len(self.chunks) == self._leave_after:
                self._leaves.set()

    async def talk_to(self, server: StoryServer, path: str = TEXT) -> Client:
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "root_path": "",
            "headers": [(b"content-type", b"application/json"), (b"host", b"story")],
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 2),
        }
        async with asyncio.timeout(LIMIT):
            await server.app(scope, self.receive, self.send)
        return self


LONG = dict(prompt="once", max_tokens=1000, ignore_eos=True)
LONG_CONTEXT = dict(max_model_len=1100, num_blocks=2000)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 3])
def test_who_leaves_is_aborted_and_the_blocks_are_free(stream, n):
    async def use(server: StoryServer):
        all_free = server.num_free_blocks
        fields = dict(LONG, stream=stream, n=n)
        for leave_after in (0, 1, 5) if stream else (0,):
            client = await Client(fields, leave_after).talk_to(server)
            assert len(client.chunks) < 900
            await server.until_idle()
            assert server.num_free_blocks == all_free
        aborted = await server.metric(
            'jaxinfer:request_success_total{engine="0",finished_reason="abort"'
        )
        assert aborted == n * (3 if stream else 1)
        await server.ok(TEXT, prompt="once", max_tokens=3)

    run(use, **LONG_CONTEXT)


def test_several_prompts_leave_together():
    async def use(server: StoryServer):
        all_free = server.num_free_blocks
        await Client(dict(LONG, prompt=["a", "ab", "abc"], stream=True), 4).talk_to(server)
        await server.until_idle()
        assert server.num_free_blocks == all_free

    run(use, **LONG_CONTEXT)


def test_a_slow_reader_gets_everything_in_fewer_chunks():
    class Slow(Client):
        async def send(self, message: dict[str, Any]) -> None:
            await super().send(message)
            if len(self.chunks) == 1:
                while server.core.scheduler.requests:
                    await asyncio.sleep(0)

    async def use(story: StoryServer):
        nonlocal server
        server = story
        return await Slow(dict(LONG, max_tokens=100, stream=True)).talk_to(server)

    server: StoryServer
    client = run(use, **LONG_CONTEXT)
    events = parse_events(b"".join(client.chunks).decode())
    assert len(events) <= 5
    assert "".join(e["choices"][0]["text"] for e in events) == continuation(4, 100)


def test_a_timeout_ends_what_a_client_does_not_read():
    """Its reader is stuck in the middle of an answer that would go on."""

    class Stuck(Client):
        def __init__(self, body: dict[str, Any]) -> None:
            super().__init__(body)
            self.is_stuck, self.reads_on = asyncio.Event(), asyncio.Event()

        async def send(self, message: dict[str, Any]) -> None:
            await super().send(message)
            if self.chunks:
                self.is_stuck.set()
                await self.reads_on.wait()

    async def use(server: StoryServer):
        all_free = server.num_free_blocks
        client = Stuck(dict(LONG, stream=True, timeout=0.05))
        talking = asyncio.create_task(client.talk_to(server))
        await client.is_stuck.wait()
        await server.until_idle()
        assert server.num_free_blocks == all_free and not talking.done()
        client.reads_on.set()
        await talking
        return await server.metric(
            'jaxinfer:request_success_total{engine="0",finished_reason="abort"'
        ), parse_events(b"".join(client.chunks).decode())

    def slowly(context):
        time.sleep(0.001)
        return tell(context)

    aborted, events = run(use, next_token=slowly, **LONG_CONTEXT)
    assert aborted == 1 and events[-1]["error"]["code"] == 504 and len(events) == 2


def test_sixty_four_streams_at_once_lose_nothing():
    async def use(server: StoryServer):
        all_free = server.num_free_blocks
        lengths = [(i % 20 + 1, i % 37 + 1) for i in range(64)]
        clients = await asyncio.gather(
            *(
                Client(dict(prompt="a" * num_prompt, max_tokens=num_tokens, stream=True)).talk_to(
                    server
                )
                for num_prompt, num_tokens in lengths
            )
        )
        for client, (num_prompt, num_tokens) in zip(clients, lengths, strict=True):
            choices = [
                event["choices"][0] for event in parse_events(b"".join(client.chunks).decode())
            ]
            assert "".join(c["text"] for c in choices) == continuation(num_prompt, num_tokens)
            assert [c["finish_reason"] for c in choices if c["finish_reason"]] == ["length"]
        await server.until_idle()
        assert server.num_free_blocks == all_free
        assert await server.metric("jaxinfer:num_requests_running") == 0

    run(use)
