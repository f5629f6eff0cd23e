"""Several API server processes over several engine cores; the cores have the fake device, or a tiny model."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from jaxinfer import metrics
from jaxinfer.server.control import Report
from jaxinfer.server.shared_metrics import SharedMetrics, report
from tests.engine.fake_requests import make_config
from tests.frontend.story_engine import TOKENIZER, continuation
from tests.server.server_process import ROOT, ServerProcess, server_process
from tests.server.story_server import parse_events
from tests.server.test_data_parallel import LIMIT, LONG, by_engine, unfinished
from tests.server.test_serve_process import MAIN, TEXT, client, story, stream
from tests.tiny_llm import TOKENIZER as TINY
from tests.tiny_llm import ids, oracle_greedy, tiny_llm_dir

FLAGS = ("--api-server-count", "2", "--data-parallel-size", "2", "--restart-engine")


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("story")
    TOKENIZER.save(directory)
    (directory / "config.json").write_text("{}")
    return directory


async def fresh(server: ServerProcess, path: str) -> httpx.Response:
    """Over a connection of its own, which either process may get."""
    async with client(server) as http:
        return await http.get(path)


async def shown(server: ServerProcess, name: str) -> float:
    """A metric's sum over both engines."""
    return sum(by_engine((await fresh(server, "/metrics")).text, name).values())


async def num_unfinished(server: ServerProcess) -> float:
    return sum(unfinished((await fresh(server, "/metrics")).text).values())


async def eventually(check) -> None:
    end = time.monotonic() + LIMIT
    while not await check():
        assert time.monotonic() < end
        await asyncio.sleep(0)


def start_streams(http: httpx.AsyncClient, count: int, **body):
    """Their tasks, once each has begun."""

    async def begin():
        starts = [asyncio.Event() for _ in range(count)]
        tasks = [asyncio.create_task(stream(http, event, **body)) for event in starts]
        await asyncio.gather(*(event.wait() for event in starts))
        return tasks

    return begin()


async def answers_and_exact_counts(server: ServerProcess) -> None:
    async with client(server) as http:
        tasks = [
            asyncio.create_task(stream(http, asyncio.Event(), max_tokens=9)) for _ in range(24)
        ]
        for text in await asyncio.gather(*tasks):
            choices = [event["choices"][0] for event in parse_events(text)]
            assert "".join(c["text"] for c in choices) == continuation(4, 9)

    async def nothing_runs() -> bool:
        return await num_unfinished(server) == 0

    await eventually(nothing_runs)
    steps = set()
    for _ in range(6):
        text = (await fresh(server, "/metrics")).text
        for name, total in (
            ("request_success_total", 24),
            ("generation_tokens_total", 24 * 9),
            ("prompt_tokens_total", 24 * 4),
            ("time_to_first_token_seconds_count", 24),
            ("inter_token_latency_seconds_count", 24 * 8),
            ("e2e_request_latency_seconds_count", 24),
            ("num_requests_running", 0),
            ("engine_up", 2),
        ):
            counts = by_engine(text, name)
            assert counts.keys() == {"0", "1"} and sum(counts.values()) == total, name
        tokens = by_engine(text, "iteration_tokens_total_sum")
        # Each request's prompt, and all of its tokens but the last; what was cached wasn't computed.
        assert sum(tokens.values()) == 24 * (4 + 8)
        assert min(by_engine(text, "request_success_total").values()) > 0
        steps.add(tuple(by_engine(text, "engine_steps_total").values()))
        assert text.count("\njaxinfer:num_requests_running{") == 2
        assert "process_cpu" not in text
    assert len(steps) == 1
    for pid in server.api_pids:
        assert "jaxlib" not in Path(f"/proc/{pid}/maps").read_text()


async def anatomy_is_of_the_engine_that_is_asked_for(server: ServerProcess) -> None:
    async def pictures() -> list[dict]:
        return [(await fresh(server, f"/anatomy?engine={core}")).json() for core in (0, 1)]

    async with client(server) as http:
        tasks = await start_streams(http, 24, **LONG)
        for _ in range(4):
            found = await pictures()
            assert [p["engine"] for p in found] == [0, 1] and found[0]["num_engines"] == 2
            totals = [p["requests"]["num_running"] + p["requests"]["num_waiting"] for p in found]
            assert sum(totals) == 24 and min(totals) > 0
            listed = [{r["id"] for r in p["requests"]["running"]} for p in found]
            assert not listed[0] & listed[1]
        text = (await fresh(server, "/metrics")).text
        first = by_engine(text, "time_to_first_token_seconds_count")
        counts = [p["histograms"]["time_to_first_token_seconds"]["count"] for p in found]
        assert counts == [first["0"], first["1"]]
        assert (await fresh(server, "/anatomy?engine=2")).status_code == 400
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def nothing_is_left() -> bool:
        return await num_unfinished(server) == 0

    await eventually(nothing_is_left)


async def all_sleep_and_wake_up(server: ServerProcess) -> None:
    async def states() -> dict[str, float]:
        text = (await fresh(server, "/metrics")).text
        return {
            state: sum(by_engine(text, rf'engine_sleep_state(?=.*"{state}")').values())
            for state in ("awake", "weights_offloaded")
        }

    async with client(server) as http:
        assert (await http.post("/sleep")).status_code == 200
        for _ in range(4):
            assert (await fresh(server, "/is_sleeping")).json() == {"is_sleeping": True}
            assert await states() == {"awake": 0, "weights_offloaded": 2}
        assert (await http.post("/wake_up")).status_code == 200
        assert (await fresh(server, "/is_sleeping")).json() == {"is_sleeping": False}
        assert await states() == {"awake": 2, "weights_offloaded": 0}


async def responses_are_known_to_both(server: ServerProcess) -> None:
    """Each request has a connection of its own."""

    async def post(**body) -> httpx.Response:
        async with client(server) as http:
            return await http.post("/v1/responses", json=dict(max_output_tokens=16) | body)

    first = (await post(input="once")).json()
    for _ in range(6):
        assert (await fresh(server, f"/v1/responses/{first['id']}")).json() == first
        assert (await post(input="a", previous_response_id=first["id"])).status_code == 200
    async with client(server) as http:
        path = f"/v1/responses/{first['id']}"
        assert (await http.delete(path)).json()["deleted"]
        assert (await http.delete(path)).status_code == 404
    for _ in range(6):
        assert (await post(input="a", previous_response_id=first["id"])).status_code == 404


async def an_api_server_dies(server: ServerProcess) -> None:
    old = server.api_pids
    assert len(old) == 2
    async with client(server) as http:
        tasks = await start_streams(http, 24, **LONG)
        assert (await fresh(server, "/load")).json() == {"server_load": 24}

        async def all_run() -> bool:
            return await num_unfinished(server) == 24

        await eventually(all_run)
        os.kill(old[0], signal.SIGKILL)

        async def orphans_are_gone() -> bool:
            found = await num_unfinished(server)
            return found == sum(not task.done() for task in tasks) < 24

        await eventually(orphans_are_gone)
        cut = {task for task in tasks if task.done()}
        assert 0 < len(cut) < 24
        assert all(isinstance(task.exception(), httpx.HTTPError) for task in cut)
        assert await shown(server, "request_success_total") == 24

        async def both_are_there() -> bool:
            return len(server.api_pids) == 2 and old[0] not in server.api_pids

        await eventually(both_are_there)
        assert old[1] in server.api_pids and not any(t.done() for t in tasks if t not in cut)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def nothing_is_left() -> bool:
        return await num_unfinished(server) == 0

    await eventually(nothing_is_left)
    aborted = await shown(server, "request_success_total") - 24
    assert aborted == len(tasks) - len(cut)


async def a_core_dies(server: ServerProcess) -> None:
    old = server.core_pids[0]
    async with client(server) as http:
        tasks = await start_streams(http, 16, **LONG)
        os.kill(old, signal.SIGKILL)
        killed = time.monotonic()
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        assert time.monotonic() - killed < 2

        async def one_is_not_healthy() -> bool:
            return (await fresh(server, "/health")).status_code == 503

        await eventually(one_is_not_healthy)
        assert (await fresh(server, "/metrics")).text.count("\njaxinfer:engine_up{") == 2
        answer = await http.post(TEXT, json=dict(prompt="once", max_tokens=5))
        assert answer.json()["choices"][0]["text"] == continuation(4, 5)
        failed = [task for task in tasks if task.done()]
        for task in failed:
            error = parse_events(task.result())[-1]["error"]
            assert "Engine core 0's process was killed by signal 9" in error["message"]
        running = [task for task in tasks if not task.done()]
        assert failed and running
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    async def all_are_healthy() -> bool:
        statuses = {(await fresh(server, "/health")).status_code for _ in range(8)}
        return statuses == {200} and old not in server.core_pids

    await eventually(all_are_healthy)
    async with client(server) as http:
        before = by_engine((await fresh(server, "/metrics")).text, "generation_tokens_total")
        await asyncio.gather(*[stream(http, asyncio.Event(), max_tokens=9) for _ in range(16)])
        after = by_engine((await fresh(server, "/metrics")).text, "generation_tokens_total")
        assert sum(after.values()) - sum(before.values()) == 16 * 9 and after["0"] > before["0"]


async def all_drain(server: ServerProcess) -> None:
    async with client(server) as http:
        tasks = await start_streams(http, 12, max_tokens=60, ignore_eos=True)
        server.process.send_signal(signal.SIGTERM)
        end = time.monotonic() + LIMIT
        while True:
            assert time.monotonic() < end
            try:
                await fresh(server, "/health")
            except httpx.TransportError:
                break
        for text in await asyncio.gather(*tasks):
            assert parse_events(text)[-1]["choices"][0]["finish_reason"] == "length"


def test_two_api_servers_over_two_cores(model_dir, monkeypatch):
    monkeypatch.setenv("JAXINFER_SERVER_DEV_MODE", "1")
    with story("slow", model_dir, *FLAGS) as server:
        for phase in (
            answers_and_exact_counts,
            an_api_server_dies,
            a_core_dies,
            anatomy_is_of_the_engine_that_is_asked_for,
            all_sleep_and_wake_up,
            responses_are_known_to_both,
            all_drain,
        ):
            asyncio.run(phase(server))
        assert server.process.wait(LIMIT) == 0
    assert not any(re.search("Traceback", line) for line in server.log), "".join(server.log)


def test_what_cannot_start_says_why(model_dir):
    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=60
        )

    refused = run(MAIN, "refuse", str(model_dir), *FLAGS)
    assert refused.returncode == 2
    assert refused.stderr.strip().endswith(f"jaxinfer: error: model: there is no {model_dir}.")
    none = run("-m", "jaxinfer", "serve", str(model_dir), "--api-server-count", "0")
    assert none.returncode == 2 and "api_server_count must be at least 1, got 0" in none.stderr


def test_a_tiny_model_over_two_cores_and_two_api_servers():
    prompts = ["brown", "jumps", "boxes", "their", "hands", "seven"]
    model = str(tiny_llm_dir())
    # Prompts of one length, one at a time on each core: few programs.
    limits = ("--max-model-len", "16", "--max-num-seqs", "1", "--warmup", "lazy")
    with server_process(
        ["-m", "jaxinfer", "serve", model, "--port", "0", *limits, *FLAGS]
    ) as server:

        async def use():
            body = dict(temperature=0, max_tokens=6, ignore_eos=True)
            async with client(server) as http:
                posts = [http.post(TEXT, json=dict(prompt=p) | body) for p in prompts]
                answers = await asyncio.gather(*posts)
                text = (await fresh(server, "/metrics")).text
                posts = [http.post(TEXT, json=dict(prompt="jumps", max_tokens=8)) for _ in range(6)]
                samples = await asyncio.gather(*posts)
            return answers, text, samples

        answers, text, samples = asyncio.run(use())
        # Each core draws its requests' seeds by itself, and none like another.
        assert len({sample.json()["choices"][0]["text"] for sample in samples}) == 6
        for prompt, answer in zip(prompts, answers, strict=True):
            assert answer.status_code == 200, answer.text
            assert answer.json()["choices"][0]["text"] == TINY.decode(oracle_greedy(ids(prompt), 6))
        counts = by_engine(text, "generation_tokens_total")
        assert sum(counts.values()) == 6 * len(prompts) and min(counts.values()) > 0
        assert sum(by_engine(text, "request_success_total").values()) == len(prompts)
        prompt_tokens = sum(len(ids(prompt)) for prompt in prompts)
        assert sum(by_engine(text, "prompt_tokens_total").values()) == prompt_tokens
        assert server.stop() == 0


def test_counts_are_added_and_gauges_are_not():
    shared = SharedMetrics(make_config(), [9, 9], "tale", lambda core: 0)
    one = shared.snapshot()

    def times(factor: int) -> Report:
        made = []
        for metric in one:
            if isinstance(metric, metrics.Histogram):
                bounds = {b: factor * i for i, b in enumerate(metric.buckets)}
                fields = (factor * 7, factor * 0.5, bounds)
            else:
                fields = (factor * 3.0,)
            made.append(type(metric)(metric.name, metric.labels, *fields, text=metric.text))
        return report(0, 0, made)

    shared.reports = {1: times(1), 2: times(10)}
    for before, metric in zip(one, shared.snapshot(), strict=True):
        assert (metric.name, metric.labels) == (before.name, before.labels)
        match metric:
            case metrics.Counter():
                assert metric.value == 33
            case metrics.Histogram():
                assert (metric.count, metric.sum) == (77, 5.5)
                assert list(metric.buckets.values()) == [11 * i for i in range(len(metric.buckets))]
            case _:
                assert metric == before
