"""Clients of a real server that break off at any moment, or stop reading: over sockets, which buffer."""

from __future__ import annotations

import asyncio
import json
import os
import re
import socket
import struct
import urllib.request
from http.client import HTTPResponse
from pathlib import Path

import httpx
import pytest

from tests.frontend.story_engine import STORY, TOKENIZER, continuation
from tests.server.server_process import ServerProcess, server_process
from tests.server.story_server import LIMIT, parse_events

MAIN = str(Path(__file__).with_name("story_serve_main.py"))
LONG = dict(prompt="once", max_tokens=1400, ignore_eos=True, stream=True)
NUM_BLOCKS, BLOCK_SIZE = 399, 4


@pytest.fixture
def server(tmp_path):
    TOKENIZER.save(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    flags = ("--max-model-len", "1500", "--max-num-seqs", "32", "--served-model-name", "story")
    with server_process([MAIN, "story", str(tmp_path), *flags]) as running:
        yield running


class Connection:
    """A POST of `body`, or of the beginning of it, and whatever is read of the answer."""

    def __init__(self, server: ServerProcess, body: dict, share: float = 1.0) -> None:
        host, port = server.url.removeprefix("http://").split(":")
        content = json.dumps(body).encode()
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Length: {len(content)}\r\n"
        )
        head += "Content-Type: application/json\r\nConnection: close\r\n\r\n"
        self.socket = socket.socket()
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        self.socket.connect((host, int(port)))
        self.socket.settimeout(LIMIT)
        self.socket.sendall(head.encode() + content[: int(share * len(content))])

    def read(self, num_bytes: int) -> None:
        while num_bytes > 0 and (part := self.socket.recv(65536)):
            num_bytes -= len(part)

    def answer(self) -> tuple[int, str]:
        """Status and body, of which nothing has been read yet."""
        response = HTTPResponse(self.socket)
        response.begin()
        return response.status, response.read().decode()

    def reset(self) -> None:
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.socket.close()


def metrics(server: ServerProcess) -> dict[str, float]:
    """Summed over their labels."""
    found: dict[str, float] = {}
    with urllib.request.urlopen(f"{server.url}/metrics", timeout=LIMIT) as answer:
        lines = answer.read().decode().splitlines()
    for line in lines:
        if match := re.fullmatch(r"jaxinfer:(\w+)(?:{.*})? (\S+)", line):
            found[match[1]] = found.get(match[1], 0.0) + float(match[2])
    return found


def test_connections_that_break_off_at_any_moment_are_forgotten(server):
    long_prompt = dict(LONG, prompt="a" * 1400, max_tokens=90)
    leavers = [
        *(Connection(server, LONG, share=share) for share in (0.0, 0.5)),
        *(Connection(server, body) for body in (LONG, LONG | {"stream": False}, long_prompt)),
        *(Connection(server, LONG | {"n": 2, "temperature": 1}) for _ in range(2)),
    ]
    leavers[-1].read(3000)
    for i, leaver in enumerate(leavers):
        leaver.reset() if i % 2 else leaver.socket.close()
    # What is left of them shows beside a stream that runs.
    witness = Connection(server, LONG)

    def is_alone() -> bool:
        seen = metrics(server)
        unfinished = seen["generation_tokens_total"] - seen["request_generation_tokens_sum"]
        own = (4 + unfinished) / BLOCK_SIZE + 2
        running, waiting = seen["num_requests_running"], seen["num_requests_waiting"]
        return (running, waiting) == (1, 0) and seen["kv_cache_usage_perc"] * NUM_BLOCKS <= own

    assert any(is_alone() or witness.read(2000) for _ in range(200))
    witness.reset()
    answer = httpx.post(f"{server.url}/v1/completions", json=dict(prompt="once", max_tokens=9))
    assert answer.json()["choices"][0]["text"] == continuation(4, 9)
    assert server.stop() == 0


def test_who_stops_reading_holds_up_nobody_and_gets_it_all_later(server):
    """Every event repeats an id of 4 kB, so that the answer is longer than what sockets hold."""

    def resident_mib() -> float:
        pages = Path(f"/proc/{server.process.pid}/statm").read_text().split()[1]
        return int(pages) * os.sysconf("SC_PAGE_SIZE") / 2**20

    async def others() -> None:
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as http:
            asking = [
                http.post(
                    "/v1/completions", json=dict(prompt="once", max_tokens=200, ignore_eos=True)
                )
                for _ in range(8)
            ]
            for answer in await asyncio.gather(*asking):
                assert len(answer.json()["choices"][0]["text"]) == 200

    asyncio.run(others())
    before = resident_mib()
    stuck = [Connection(server, LONG | {"request_id": str(i) * 4096}) for i in range(3)]
    asyncio.run(others())
    # The answers are made, and nothing runs any more.
    while (seen := metrics(server))["request_success_total"] < 16 + len(stuck):
        pass
    assert seen["num_requests_running"] == 0
    assert resident_mib() - before < 8
    for connection in stuck:
        status, body = connection.answer()
        events = parse_events(body)
        assert status == 200 and len(events) < 1400, "what nobody read came as one"
        choices = [event["choices"][0] for event in events]
        assert "".join(choice["text"] for choice in choices) == (STORY * 30)[4:1404]
        assert [c["finish_reason"] for c in choices if c["finish_reason"]] == ["length"]
    assert server.stop() == 0
