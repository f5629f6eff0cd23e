"""`jaxinfer bench` as people run it: in this process, and against server processes."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from jaxinfer import cli
from jaxinfer.bench import server_process as bench_server
from jaxinfer.bench.client import StreamingClient
from jaxinfer.bench.datasets import BenchRequest
from jaxinfer.bench.load import run_load
from jaxinfer.bench.sweep import Trial, best_trial, configurations, search_rate
from jaxinfer.bench.timeline import Timeline
from tests.frontend.story_engine import TOKENIZER, story_engine
from tests.server.server_process import server_process
from tests.tiny_llm import tiny_llm_dir

STORY_MAIN = str(Path(__file__).parents[1] / "server" / "story_serve_main.py")


# ---- against a server ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("story")
    TOKENIZER.save(directory)
    (directory / "config.json").write_text("{}")
    return directory


@pytest.fixture(scope="module")
def url(model_dir):
    flags = ["--max-model-len", "200", "--max-num-seqs", "16", "--api-key", "k"]
    with server_process([STORY_MAIN, "story", str(model_dir), *flags]) as server:
        yield server.url


@pytest.fixture
def serve(url, model_dir, tmp_path, monkeypatch):
    """Runs `bench serve`; gives the exit code, the result, and by how much the server's metrics grew."""
    monkeypatch.setenv("OPENAI_API_KEY", "k")

    def run(*flags):
        before = metrics(url)
        command = ["bench", "serve", "--base-url", url, "--tokenizer", str(model_dir)]
        where = ["--save-detailed", "--result-dir", str(tmp_path), "--result-filename", "r.json"]
        code = cli.main([*command, *where, *flags])
        after = metrics(url)
        grown = {name: after[name] - before.get(name, 0) for name in after}
        return code, json.loads((tmp_path / "r.json").read_text()), grown

    return run


def metrics(url):
    text = httpx.get(f"{url}/metrics").text
    return {
        (sample.name.removeprefix("jaxinfer:"), sample.labels.get("finished_reason")): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if "le" not in sample.labels
    }


LENGTHS = ["--random-input-len", "20", "--random-output-len", "12", "--random-range-ratio", "0.5"]


def test_totals_are_the_servers_and_latencies_at_least_its(serve):
    code, result, grown = serve("--num-prompts", "60", "--max-concurrency", "24", *LENGTHS)
    assert code == 0 and (result["completed"], result["failed"]) == (60, 0)
    assert result["total_input_tokens"] == grown["prompt_tokens_total", None]
    assert result["total_output_tokens"] == grown["generation_tokens_total", None]
    assert grown["request_success_total", "length"] == 60
    assert grown["time_to_first_token_seconds_count", None] == 60
    for ours, theirs in (("ttft", "time_to_first_token"), ("e2el", "e2e_request_latency")):
        mean = grown[f"{theirs}_seconds_sum", None] / grown[f"{theirs}_seconds_count", None]
        assert result[f"mean_{ours}_ms"] >= 1e3 * mean > 0
    assert sum(result["input_lens"]) == result["total_input_tokens"]
    assert {10 <= n <= 30 for n in result["input_lens"]} == {True}
    assert result["max_concurrent_requests"] <= 24
    assert len(result["ttfts"]) == 60 and max(map(len, result["itls"])) <= 17
    assert result["request_throughput"] == pytest.approx(60 / result["duration"])


def test_chat_with_arrivals_warm_ups_and_goodput(serve, tmp_path):
    plot = tmp_path / "plot.svg"
    code, result, grown = serve(
        *("--backend", "openai-chat", "--num-prompts", "20", "--request-rate", "200"),
        *("--num-warmups", "5", "--goodput", "e2el:60000", "--plot", str(plot), *LENGTHS),
        *("--metadata", "machine=this one", "--label", "chats"),
    )
    assert code == 0 and result["completed"] == 20
    assert grown["request_success_total", "length"] == 25
    assert grown["prompt_tokens_total", None] > result["total_input_tokens"] > 20 * 10
    assert result["request_goodput"] == result["request_throughput"]
    assert result["duration"] >= max(result["start_times"]) > 0.02
    assert (result["machine"], result["label"]) == ("this one", "chats")
    assert plot.read_text().startswith("<svg")


def test_shared_prefixes_are_found_in_the_prefix_cache(serve):
    lengths = ("--prefix-repetition-prefix-len", "32", "--prefix-repetition-num-prefixes", "2")
    code, result, grown = serve(
        *("--dataset-name", "prefix_repetition", "--num-prompts", "20", *lengths),
        *("--input-len", "8", "--output-len", "4", "--max-concurrency", "1"),
    )
    assert code == 0 and result["total_output_tokens"] == 80
    assert set(result["input_lens"]) == {40}
    assert grown["prefix_cache_hits_total", None] >= 18 * 32


def test_requests_that_fail_are_counted_and_the_others_measured(serve, tmp_path, capsys):
    lines = [{"prompt": "once", "output_tokens": 5}, {"prompt": "x" * 500}]
    data = tmp_path / "data.jsonl"
    data.write_text("\n".join(map(json.dumps, lines)))
    code, result, _ = serve(
        *("--dataset-name", "custom", "--dataset-path", str(data), "--num-prompts", "6"),
        *("--percentile-metrics", "ttft,e2el", "--metric-percentiles", "75"),
    )
    assert {k for k in result if k.endswith("_ms") and k.startswith("p")} == {
        "p75_ttft_ms",
        "p75_e2el_ms",
    }
    assert code == 1 and (result["completed"], result["failed"]) == (3, 3)
    assert result["total_output_tokens"] == 15 and result["input_lens"][:1] == [4]
    assert "HTTP 400" in result["errors"][1] and result["errors"][0] is None
    assert "3 requests failed: HTTP 400" in capsys.readouterr().err


def test_a_server_that_is_not_there_or_wants_a_key(url, model_dir, capsys, monkeypatch):
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    command = ["bench", "serve", "--tokenizer", str(model_dir), "--num-prompts", "1"]
    assert cli.main([*command, "--base-url", url]) == 2
    assert "OPENAI_API_KEY" in capsys.readouterr().err
    nowhere = ["--port", "9", "--ready-check-timeout-sec", "0"]
    assert cli.main([*command, *nowhere]) == 2
    assert "doesn't serve a model" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--request-rate", "0"], "request_rate"),
        (["--goodput", "ttft"], "goodput"),
        (["--metadata", "x"], "metadata must be NAME=VALUE"),
        (["--num-prompts", "0"], "num_prompts"),
        (["--metric-percentiles", "x"], "metric_percentiles"),
        (["--percentile-metrics", "ttft,latency"], "percentile_metrics may hold"),
    ],
)
def test_bad_flags_are_refused_before_anything_is_sent(flags, message, capsys):
    assert cli.main(["bench", "serve", "--port", "9", *flags]) == 2
    assert message in capsys.readouterr().err


# ---- the client by itself --------------------------------------------------------------------------------------------


def answer(*events, status=200, done=True):
    """A client whose server sends these events."""
    data = [json.dumps(event) for event in events] + (["[DONE]"] if done else [])
    body = "".join(f"data: {text}\n\n" for text in data)

    async def use():
        transport = httpx.MockTransport(lambda request: httpx.Response(status, text=body))
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as http:
            client = StreamingClient(http, "/v1/chat/completions", "m", {})
            return await client.send(BenchRequest("a", 1, 3))

    return asyncio.run(use())


def delta(finish=None, **fields):
    return {"choices": [{"index": 0, "delta": fields, "finish_reason": finish}]}


def test_who_speaks_is_no_token():
    usage = {"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 2}}
    found = answer(
        delta(role="assistant", content=""), delta(content="hi"), delta("stop", content="!"), usage
    )
    assert found.error is None and found.text == "hi!"
    assert len(found.token_times) == 2
    assert (found.num_prompt_tokens, found.num_output_tokens) == (9, 2)


@pytest.mark.parametrize(
    ("kwargs", "events", "message"),
    [
        (dict(status=503), [], "HTTP 503"),
        (dict(done=False), [delta(content="hi")], "broke off"),
        ({}, [], "no token"),
        ({}, [delta(content="hi"), {"error": {"message": "engine died"}}], "engine died"),
        ({}, ["text"], "AttributeError"),
    ],
)
def test_answers_that_are_failures(kwargs, events, message):
    assert message in answer(*events, **kwargs).error


def test_no_more_requests_run_than_may():
    running, most, order = 0, 0, []

    class Client:
        async def send(self, request):
            nonlocal running, most
            running += 1
            most = max(most, running)
            order.append(request)
            for _ in range(5):
                await asyncio.sleep(0)
            running -= 1
            return Timeline(float(request))

    timelines, _ = asyncio.run(run_load(Client(), range(20), [0.0] * 20, 3))
    assert most == 3 and order == list(range(20))
    assert [t.start for t in timelines] == list(range(20))


# ---- in this process -------------------------------------------------------------------------------------------------


@pytest.fixture
def engine(monkeypatch):
    seen = []

    def build(args):
        seen.append(args)
        return story_engine()[0]

    monkeypatch.setattr("jaxinfer.llm.build_engine", build)
    return seen


def test_latency_of_batches(engine, tmp_path, capsys):
    out = tmp_path / "latency.json"
    sizes = "--input-len 8 --output-len 5 --batch-size 3 --num-iters 4 --num-iters-warmup 1"
    command = ["bench", "latency", "--model", "m", *sizes.split(), "--output-json", str(out)]
    assert cli.main(command) == 0
    result = json.loads(out.read_text())
    assert len(result["latencies"]) == 4
    assert result["avg_latency"] == pytest.approx(sum(result["latencies"]) / 4)
    assert result["percentiles"]["50"] == pytest.approx(sum(sorted(result["latencies"])[1:3]) / 2)
    assert set(result["percentiles"]) == {"10", "25", "50", "75", "90", "99"}
    assert engine[0].model == "m" and engine[0].enable_prefix_caching is False
    assert "mean latency" in capsys.readouterr().out


def test_throughput_counts_all_tokens(engine, tmp_path):
    out = tmp_path / "throughput.json"
    flags = "--num-prompts 10 --random-input-len 9 --random-output-len 4 --n 2 --max-num-seqs 8"
    command = ["bench", "throughput", "--model", "m", *flags.split(), "--output-json", str(out)]
    assert cli.main(command) == 0
    result = json.loads(out.read_text())
    assert result["num_requests"] == 10 and result["total_prompt_tokens"] == 90
    assert result["total_output_tokens"] == 80 and result["total_num_tokens"] == 170
    assert result["requests_per_second"] == pytest.approx(10 / result["elapsed_time"])
    assert engine[0].max_num_seqs == 8 and engine[0].warmup == "all"


def test_offline_flags_that_can_not_be(engine, capsys):
    assert cli.main(["bench", "latency", "--model", "m", "--batch-size", "0"]) == 2
    assert "batch_size must be at least 1" in capsys.readouterr().err and not engine


def test_the_client_loads_no_jax():
    """It would take seconds, and a GPU's memory."""
    code = "import jaxinfer.bench.sweep, sys; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


# ---- sweep -----------------------------------------------------------------------------------------------------------


def test_only_pairs_that_an_engine_takes():
    assert configurations([4, 8], [6, 8]) == [(4, 6), (4, 8), (8, 8)]
    with pytest.raises(ValueError, match="max_num_batched_tokens"):
        configurations([16], [8])


def test_the_rate_is_bisected_down_to_the_limit():
    tried = []

    def attempt(rate, number):
        assert number == len(tried)
        figures = {"request_throughput": 16.0, "output_throughput": min(rate, 16.0)}
        return Trial(1, 1, rate, rate <= 5.5, figures)

    search_rate(attempt, float("inf"), 6, tried.append)
    assert [t.request_rate for t in tried] == [float("inf"), 8, 4, 6, 5, 5.5]
    assert best_trial(tried).request_rate == 5.5
    met = []
    search_rate(lambda rate, number: Trial(1, 1, rate, True, {}), 3.0, 6, met.append)
    assert [t.request_rate for t in met] == [3.0]
    assert best_trial([Trial(1, 1, 1.0)]) is None


def test_a_sweep_starts_servers_and_ends_them(tmp_path, monkeypatch, capsys):
    """Over a real model, whose server counts the same. The second server can't start."""
    started, counted = [], []
    popen = bench_server.subprocess.Popen

    def start(command, **kwargs):
        if started:
            command = [*command, "--block-size", "0"]
        started.append(popen(command, **kwargs))
        return started[-1]

    @contextmanager
    def watched(*args):
        with bench_server.server_process(*args) as url:
            yield url
            counted.append(metrics(url))

    monkeypatch.setattr(bench_server.subprocess, "Popen", start)
    monkeypatch.setattr("jaxinfer.bench.sweep.server_process", watched)
    out = tmp_path / "sweep.json"
    command = ["bench", "sweep", "--model", str(tiny_llm_dir()), "--max-num-seqs", "4", "2"]
    command += ["--max-num-batched-tokens", "16", "--p99-limit", "e2el:600000", "ttft:600000"]
    command += ["--num-prompts", "6", "--input-len", "8", "--output-len", "4"]
    command += ["--request-rate", "50"]
    command += ["--output-json", str(out), "--serve-args", "--warmup", "lazy"]
    command += ["--max-model-len", "48", "--block-size", "4"]
    assert cli.main(command) == 0
    assert [process.poll() is not None for process in started] == [True, True]
    found = json.loads(out.read_text())
    best, failed = found["trials"]
    assert found["best"] == best and best["figures"]["total_output_tokens"] == 24
    assert (best["max_num_seqs"], best["max_num_batched_tokens"]) == (4, 16)
    [server] = counted
    assert server["prompt_tokens_total", None] == best["figures"]["total_input_tokens"] == 48
    assert server["generation_tokens_total", None] == 24
    assert server["request_success_total", "length"] == 6
    ttft = server["time_to_first_token_seconds_sum", None] / 6
    assert best["figures"]["mean_ttft_ms"] >= 1e3 * ttft
    assert server["engine_steps_total", None] >= 5
    assert failed["figures"] is None and "block_size must be at least 1" in failed["error"]
    text = capsys.readouterr().out
    assert "best: --max-num-seqs 4 --max-num-batched-tokens 16" in text and "p99 ttft" in text
