"""Spans of requests, out of OpenTelemetry's in-memory exporter."""

from __future__ import annotations

import asyncio
import gzip
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import pytest

from jaxinfer import cli
from jaxinfer.async_llm import AsyncLLM
from jaxinfer.server.app import build_app
from jaxinfer.server.settings import ServerSettings
from jaxinfer.server.tracing import Tracing, otlp_exporter
from tests.frontend.story_engine import TOKENIZER, story_engine
from tests.server.server_process import server_process

MAIN = str(Path(__file__).with_name("story_serve_main.py"))
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


def test_missing_packages_are_bad_input(monkeypatch, tmp_path, capsys):
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(ValueError, match=r"otlp_traces_endpoint needs .*jaxinfer\[otlp\]"):
        otlp_exporter("http://127.0.0.1:4317")
    command = ["serve", str(tmp_path), "--port", "0", "--otlp-traces-endpoint", "http://127.0.0.1"]
    assert cli.main(command) == 2
    assert "otlp_traces_endpoint" in capsys.readouterr().err


def test_protocols(monkeypatch):
    pytest.importorskip("opentelemetry.exporter.otlp.proto.grpc")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "carrier pigeon")
    with pytest.raises(ValueError, match="must be grpc or http/protobuf, got 'carrier pigeon'"):
        otlp_exporter("http://127.0.0.1:4317")
    kinds = []
    for protocol in ("grpc", "http/protobuf"):
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", protocol)
        exporter = otlp_exporter("http://127.0.0.1:4317")
        kinds.append(type(exporter).__module__)
        exporter.shutdown()
    assert "grpc" in kinds[0] and "http" in kinds[1]


@pytest.fixture
def spans_of():
    """Runs requests against the story engine; gives their answers and their spans."""
    pytest.importorskip("opentelemetry.sdk")
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    def run(use, next_token=None):
        engine, _ = story_engine(*([] if next_token is None else [next_token]))
        llm = AsyncLLM.from_engine(engine)
        exporter = InMemorySpanExporter()
        tracing = Tracing(exporter, "story")
        app = build_app(llm, ServerSettings(("story",)), tracing=tracing)

        async def drive():
            transport = httpx.ASGITransport(app, raise_app_exceptions=False)
            async with httpx.AsyncClient(transport=transport, base_url="http://story") as http:
                return await use(http)

        try:
            found = asyncio.run(drive())
        finally:
            llm.shutdown()
            tracing.shutdown()
        return found, exporter.get_finished_spans()

    return run


def test_a_span_says_what_the_request_was_and_how_long_it_took(spans_of):
    headers = {"traceparent": f"00-{TRACE}-{PARENT}-01", "x-request-id": "mine"}
    body = dict(prompt="once", max_tokens=8, temperature=0.5, top_p=0.9, seed=1)

    async def use(http):
        before = time.time_ns()
        answer = (await http.post("/v1/completions", json=body, headers=headers)).json()
        return before, answer, time.time_ns()

    (before, answer, after), [span] = spans_of(use)
    assert span.name == "llm_request" and span.kind.name == "SERVER"
    assert f"{span.context.trace_id:032x}" == TRACE and f"{span.parent.span_id:016x}" == PARENT
    found = dict(span.attributes)
    assert answer["id"] == "cmpl-mine" and found["gen_ai.request.id"] == "cmpl-mine-0"
    assert found["gen_ai.usage.prompt_tokens"] == answer["usage"]["prompt_tokens"] == 4
    assert found["gen_ai.usage.completion_tokens"] == answer["usage"]["completion_tokens"] == 8
    assert (found["gen_ai.request.temperature"], found["gen_ai.request.top_p"]) == (0.5, 0.9)
    assert (found["gen_ai.request.max_tokens"], found["gen_ai.request.n"]) == (8, 1)
    assert found["gen_ai.response.model"] == "story"
    assert span.status.is_unset and span.resource.attributes["service.name"] == "jaxinfer"
    slack = 2_000_000  # ns: two clocks
    assert before - slack <= span.start_time < span.end_time <= after + slack
    e2e = found["gen_ai.latency.e2e"]
    assert e2e == pytest.approx((span.end_time - span.start_time) / 1e9, abs=1e-5)
    queue, prefill, decode, inference, first = (
        found[f"gen_ai.latency.{name}"]
        for name in (
            "time_in_queue",
            "time_in_model_prefill",
            "time_in_model_decode",
            "time_in_model_inference",
            "time_to_first_token",
        )
    )
    assert prefill + decode == pytest.approx(inference) and min(queue, prefill, decode) >= 0
    assert queue + prefill <= first + 1e-9 and first + decode == pytest.approx(e2e, abs=1e-3)


def test_requests_without_a_trace_start_their_own(spans_of):
    async def use(http):
        body = dict(prompt=["a", "ab"], n=2, max_tokens=3, temperature=1)
        await http.post("/v1/completions", json=body)
        await http.post("/v1/completions", json=dict(prompt="abc", max_tokens=2, stream=True))
        await http.post("/v1/completions", json=dict(prompt="once", max_tokens=0))  # refused

    _, spans = spans_of(use)
    assert [s.attributes["gen_ai.usage.prompt_tokens"] for s in spans] == [1, 2, 3]
    assert [s.attributes["gen_ai.usage.completion_tokens"] for s in spans] == [6, 6, 2]
    assert all(s.parent is None for s in spans)
    assert len({s.context.trace_id for s in spans}) == 3


def test_a_request_that_fails_has_an_error_status(spans_of):
    def broken(context):
        raise RuntimeError("the device fell off")

    async def use(http):
        return (await http.post("/v1/completions", json=dict(prompt="once"))).status_code

    status, [span] = spans_of(use, broken)
    assert status == 500 and span.status.status_code.name == "ERROR"
    assert "gen_ai.latency.time_to_first_token" not in span.attributes


def test_a_server_sends_its_last_spans_before_it_ends(monkeypatch, tmp_path):
    """Over HTTP to a collector of our own."""
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    received = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self):
            data = self.rfile.read(int(self.headers["content-length"]))
            if self.headers.get("content-encoding") == "gzip":
                data = gzip.decompress(data)
            received.append(ExportTraceServiceRequest.FromString(data))
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *args):
            pass

    TOKENIZER.save(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/protobuf")
    with ThreadingHTTPServer(("127.0.0.1", 0), Collector) as collector:
        threading.Thread(target=collector.serve_forever, daemon=True).start()
        endpoint = f"http://127.0.0.1:{collector.server_port}/v1/traces"
        command = [MAIN, "story", str(tmp_path), "--max-model-len", "200"]
        with server_process([*command, "--otlp-traces-endpoint", endpoint]) as server:
            for i in range(3):
                body = dict(prompt="once", max_tokens=5, request_id=f"r{i}")
                httpx.post(f"{server.url}/v1/completions", json=body).raise_for_status()
            assert server.stop() == 0
        collector.shutdown()
    spans = [
        span
        for request in received
        for resource in request.resource_spans
        for scope in resource.scope_spans
        for span in scope.spans
    ]
    assert [span.name for span in spans] == ["llm_request"] * 3
    ids = {
        a.value.string_value for s in spans for a in s.attributes if a.key == "gen_ai.request.id"
    }
    assert ids == {"cmpl-r0-0", "cmpl-r1-0", "cmpl-r2-0"}
