"""Several engine cores behind one server, over the fake device."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import time
from collections import Counter
from pathlib import Path

import httpx
import pytest

from jaxinfer.engine_args import EngineArgs
from jaxinfer.engine_factory import build_engine
from jaxinfer.remote_core import CoreStarter, core_environment
from tests.frontend.story_engine import TOKENIZER, continuation
from tests.server.server_process import ServerProcess
from tests.server.story_server import parse_events
from tests.server.test_serve_process import TEXT, client, story, stream

LIMIT = 30.0
LONG = dict(max_tokens=1400, ignore_eos=True)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("story")
    TOKENIZER.save(directory)
    (directory / "config.json").write_text("{}")
    return directory


def by_engine(metrics: str, name: str) -> dict[str, float]:
    """A metric's value per engine, all other labels summed over."""
    found: Counter[str] = Counter()
    for line in metrics.splitlines():
        if match := re.match(rf'jaxinfer:{name}{{.*?engine="(\d+)".*}} (\S+)$', line):
            found[match[1]] += float(match[2])
    return dict(found)


def unfinished(metrics: str) -> dict[str, float]:
    """Requests at each engine: those that run, and those that wait, as they do once the blocks run out."""
    running = by_engine(metrics, "num_requests_running")
    waiting = by_engine(metrics, "num_requests_waiting")
    return {engine: number + waiting[engine] for engine, number in running.items()}


async def until(http: httpx.AsyncClient, path: str, status: int) -> None:
    end = time.monotonic() + LIMIT
    while (await http.get(path)).status_code != status:
        assert time.monotonic() < end


def test_two_cores_share_the_work_and_one_dies(model_dir):
    flags = ("--data-parallel-size", "2", "--restart-engine")
    with story("slow", model_dir, *flags) as server:
        assert any("2 engine cores, each with a KV cache of 400 blocks" in x for x in server.log)

        async def use():
            async with client(server) as http:
                starts = [asyncio.Event() for _ in range(8)]
                short = await asyncio.gather(*(stream(http, s, max_tokens=9) for s in starts))
                metrics = [(await http.get("/metrics")).text]
                starts = [asyncio.Event() for _ in range(6)]
                streams = [asyncio.create_task(stream(http, s, **LONG)) for s in starts]
                await asyncio.gather(*(s.wait() for s in starts))
                old, kept = server.core_pids[1], server.core_pids[0]
                os.kill(old, signal.SIGKILL)
                killed = time.monotonic()
                await asyncio.wait(streams, return_when=asyncio.FIRST_COMPLETED)
                assert time.monotonic() - killed < 2
                assert (await http.get("/health")).status_code == 503
                metrics.append((await http.get("/metrics")).text)
                # The other core goes on.
                answer = await http.post(TEXT, json=dict(prompt="once", max_tokens=5))
                await until(http, "/health", 200)
                assert kept in server.core_pids and old not in server.core_pids
                failed = [parse_events(task.result())[-1] for task in streams if task.done()]
                running = [task for task in streams if not task.done()]
                starts = [asyncio.Event() for _ in range(2)]
                more = [asyncio.create_task(stream(http, s, **LONG)) for s in starts]
                await asyncio.gather(*(s.wait() for s in starts))
                metrics.append((await http.get("/metrics")).text)
                for task in (*running, *more):
                    task.cancel()
                await asyncio.wait((*running, *more))
            return short, metrics, failed, answer.json(), len(running)

        short, (first, dead, last), failed, answer, num_running = asyncio.run(use())
        for text in short:
            choices = [event["choices"][0] for event in parse_events(text)]
            assert "".join(c["text"] for c in choices) == continuation(4, 9)
        # What each core did, and exactly what was asked of both.
        for name, total in (
            ("request_success_total", 8),
            ("generation_tokens_total", 72),
            ("prompt_tokens_total", 32),
            ("time_to_first_token_seconds_count", 8),
            ("e2e_request_latency_seconds_count", 8),
        ):
            counts = by_engine(first, name)
            assert counts.keys() == {"0", "1"} and sum(counts.values()) == total, name
            assert min(counts.values()) > 0
        assert by_engine(first, "num_requests_running") == {"0": 0, "1": 0}
        assert by_engine(first, "engine_up") == {"0": 1, "1": 1}
        assert num_running + len(failed) == 6 and num_running and failed
        assert all("Engine core 1's process was killed" in f["error"]["message"] for f in failed)
        assert by_engine(dead, "engine_up") == {"0": 1, "1": 0}
        assert answer["choices"][0]["text"] == continuation(4, 5)
        assert by_engine(last, "engine_up") == {"0": 1, "1": 1}
        # The new core had the least to do.
        assert unfinished(last) == {"0": num_running, "1": 2}
        assert server.stop() == 0


def test_prefixes_go_where_they_are_cached(model_dir):
    flags = ("--data-parallel-size", "2", "--data-parallel-routing", "prefix")
    with story("story", model_dir, *flags) as server:
        assert [ask(server, "abcdefgh" * 4 + letter) for letter in "uvwxyz"] == [0] + 5 * [32]
        assert server.stop() == 0


def ask(server: ServerProcess, prompt: str) -> int:
    """How many tokens of the prompt were cached."""
    body = dict(prompt=prompt, max_tokens=1)
    usage = httpx.post(server.url + TEXT, json=body, timeout=60).json()["usage"]
    return (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)


def test_python_has_one_engine_per_process(model_dir):
    with pytest.raises(ValueError, match="data_parallel_size is for `jaxinfer serve`, got 2"):
        build_engine(EngineArgs(str(model_dir), data_parallel_size=2))
    with pytest.raises(ValueError, match="data_parallel_size must be at least 1, got 0"):
        EngineArgs("m", data_parallel_size=0)


def test_every_core_has_a_rank(monkeypatch):
    monkeypatch.setattr("jaxinfer.remote_core.CoreProcess", lambda command, args, *_: args)
    for first in (0, 3):
        args = EngineArgs("m", data_parallel_size=2, data_parallel_rank=first)
        started = CoreStarter(args, []).start_all()
        assert [core.data_parallel_rank for core in started] == [first, first + 1]


def test_visible_gpus_are_divided(monkeypatch, tmp_path):
    monkeypatch.setattr("jaxinfer.remote_core.GPU_DRIVERS", (str(tmp_path),))
    monkeypatch.setenv("JAX_PLATFORMS", "cuda,cpu")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4, 2,GPU-1,7,9")
    found = [core_environment(core, 2, 2)["CUDA_VISIBLE_DEVICES"] for core in (0, 1)]
    assert found == ["4,2", "GPU-1,7"]
    with pytest.raises(ValueError, match="takes 6 GPUs, and there are 5"):
        core_environment(0, 3, 2)
    assert core_environment(0, 1, 1) == {}
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    assert core_environment(1, 2, 2) == {}
