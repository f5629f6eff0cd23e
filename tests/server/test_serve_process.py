"""The server's process and its end: drained, killed, refused. The core is a process too, over the fake device."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from tests.frontend.story_engine import TOKENIZER, continuation
from tests.server.server_process import ROOT, ServerProcess, server_process
from tests.server.story_server import error_of, parse_events

MAIN = str(Path(__file__).with_name("story_serve_main.py"))
TEXT = "/v1/completions"


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory) -> Path:
    """All that the API server's process reads of a model."""
    directory = tmp_path_factory.mktemp("story")
    TOKENIZER.save(directory)
    (directory / "config.json").write_text("{}")
    return directory


def story(kind: str, model_dir: Path, *flags: str):
    limits = ("--max-model-len", "1500", "--max-num-seqs", "64")
    return server_process([MAIN, kind, str(model_dir), *limits, *flags])


async def stream(http: httpx.AsyncClient, started: asyncio.Event, **body) -> str:
    """The whole answer. `started`: something has come."""
    text = ""
    async with http.stream("POST", TEXT, json=dict(prompt="once", stream=True) | body) as response:
        assert response.status_code == 200
        async for part in response.aiter_text():
            text += part
            started.set()
    return text


def client(server: ServerProcess) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=server.url, timeout=60)


def test_sixty_four_clients_and_a_drain(model_dir):
    with story("story", model_dir, "--api-key", "k", "--served-model-name", "tale") as server:
        assert any("399" in line or "400 blocks" in line for line in server.log)

        async def use():
            async with client(server) as http:
                assert (await http.get("/v1/models")).status_code == 401
                http.headers["authorization"] = "Bearer k"
                assert (await http.get("/v1/models")).json()["data"][0]["id"] == "tale"
                starts = [asyncio.Event() for _ in range(64)]
                texts = await asyncio.gather(
                    *(stream(http, event, max_tokens=i + 20) for i, event in enumerate(starts))
                )
                metrics = (await http.get("/metrics")).text
            return texts, metrics

        texts, metrics = asyncio.run(use())
        for i, text in enumerate(texts):
            choices = [event["choices"][0] for event in parse_events(text)]
            assert "".join(c["text"] for c in choices) == continuation(4, i + 20)
        assert 'finished_reason="length",model_name="tale"} 64.0' in metrics
        assert 'num_requests_running{engine="0",model_name="tale"} 0.0' in metrics
        assert server.stop() == 0


def test_sigterm_lets_running_requests_finish_and_takes_no_more(model_dir):
    with story("slow", model_dir) as server:

        async def use():
            async with client(server) as http, client(server) as other:
                started = asyncio.Event()
                running = asyncio.create_task(stream(http, started, max_tokens=200))
                await started.wait()
                server.process.send_signal(signal.SIGTERM)
                while True:
                    try:
                        await other.get("/health")
                    except httpx.TransportError:
                        break
                assert not running.done()
                return await running

        events = parse_events(asyncio.run(use()))
        assert events[-1]["choices"][0]["finish_reason"] == "length"
        assert server.process.wait(30) == 0


def test_what_does_not_finish_in_time_is_cut(model_dir):
    with story("slow", model_dir, "--shutdown-timeout", "1") as server:

        async def use():
            async with client(server) as http:
                started = asyncio.Event()
                running = asyncio.create_task(
                    stream(http, started, max_tokens=1400, ignore_eos=True)
                )
                await started.wait()
                server.process.send_signal(signal.SIGINT)
                with pytest.raises(httpx.HTTPError):
                    await running

        asyncio.run(use())
        assert server.process.wait(30) == 130


def test_a_killed_core_fails_what_runs_and_turns_health_to_503(model_dir):
    with story("slow", model_dir) as server:

        async def use():
            async with client(server) as http:
                starts = [asyncio.Event() for _ in range(8)]
                long = dict(max_tokens=1400, ignore_eos=True)
                streams = [asyncio.create_task(stream(http, s, **long)) for s in starts]
                whole = asyncio.create_task(http.post(TEXT, json=dict(prompt="once", **long)))
                await asyncio.gather(*(s.wait() for s in starts))
                os.kill(server.core_pid, signal.SIGKILL)
                killed = time.monotonic()
                texts, response = await asyncio.gather(*streams), await whole
                assert time.monotonic() - killed < 2
                after = await http.get("/health"), await http.post(TEXT, json=dict(prompt="a"))
                metrics = (await http.get("/metrics")).text
            return texts, response, after, metrics

        texts, response, after, metrics = asyncio.run(use())
        for text in texts:
            *_, error = parse_events(text)
            assert "killed by signal 9" in error["error"]["message"]
        assert response.status_code == 500 and "killed" in error_of(response)["message"]
        assert [r.status_code for r in after] == [503, 503]
        assert 'finished_reason="error",model_name="' in metrics
        assert re.search(r"jaxinfer:engine_up{.*} 0.0", metrics)
        assert server.stop() == 0


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_new_core_takes_over(model_dir, number):
    flags = ("--restart-engine", "--engine-heartbeat-timeout", "1")
    with story("story", model_dir, *flags) as server:

        async def use():
            async with client(server) as http:
                old = server.core_pid
                os.kill(old, number)
                end = time.monotonic() + 30
                statuses = set()
                while 200 not in statuses or 503 not in statuses:
                    assert time.monotonic() < end
                    status = (await http.get("/health")).status_code
                    statuses = {status} if status == 503 else statuses | {status}
                assert server.core_pid != old
                return (await http.post(TEXT, json=dict(prompt="once", max_tokens=5))).json()

        assert asyncio.run(use())["choices"][0]["text"] == continuation(4, 5)
        assert server.stop() == 0


def test_a_client_that_hangs_up_is_aborted(model_dir):
    with story("slow", model_dir) as server:

        async def use():
            async with client(server) as http:
                async with http.stream(
                    "POST", TEXT, json=dict(prompt="once", stream=True, max_tokens=1400)
                ) as response:
                    await anext(response.aiter_bytes())
                left = time.monotonic()
                while 'finished_reason="abort"' + f',model_name="{model_dir}"' + "} 1.0" not in (
                    text := (await http.get("/metrics")).text
                ):
                    assert time.monotonic() - left < 5, text

        asyncio.run(use())


def test_start_errors_are_one_line_and_code_2(model_dir, tmp_path):
    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=60
        )

    refused = run(MAIN, "refuse", str(model_dir))
    assert refused.returncode == 2
    assert refused.stderr.strip() == f"jaxinfer: error: model: there is no {model_dir}."
    failed = run(MAIN, "fail", str(model_dir))
    assert failed.returncode == 1 and "RuntimeError: no device" in failed.stderr
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        busy = run("-m", "jaxinfer", "serve", str(model_dir), "--port", port)
    assert busy.returncode == 2 and f"can't listen on 127.0.0.1:{port}" in busy.stderr
    for flags, text in (
        (("--chat-template", "nowhere.jinja"), "chat_template"),
        (("--port", "70000"), "port must be in"),
        (("--ssl-certfile", "nowhere.pem"), "ssl_certfile"),
        (("--max-num-queued-reqs", "-1"), "max_num_queued_reqs"),
        (("--engine-heartbeat-timeout", "nan"), "engine_heartbeat_timeout"),
    ):
        done = run("-m", "jaxinfer", "serve", str(model_dir), *flags)
        assert done.returncode == 2 and text in done.stderr, done.stderr
