"""`--otlp-traces-endpoint`: a span per request, sent to an OpenTelemetry collector. Names are vLLM's."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from jaxinfer.engine.messages import EngineCoreOutputs, FinishReason
from jaxinfer.frontend.processor import PreparedRequest
from jaxinfer.outputs import RequestOutput
from jaxinfer.server.settings import ServerSettings

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace.export import SpanExporter

SPAN = "llm_request"
_PROTOCOL_VARIABLE = "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"


def otlp_exporter(endpoint: str) -> SpanExporter:
    """By gRPC, or by HTTP where `$OTEL_EXPORTER_OTLP_TRACES_PROTOCOL` is "http/protobuf".

    Raises `ValueError` for another protocol, and where OpenTelemetry's packages are missing.
    """
    protocol = os.environ.get(_PROTOCOL_VARIABLE, "grpc")
    try:
        import opentelemetry.sdk.trace  # noqa: F401

        if protocol == "grpc":
            from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter

            return OTLPSpanExporter(endpoint, insecure=not endpoint.startswith("https://"))
        if protocol == "http/protobuf":
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import (
                OTLPSpanExporter as HttpExporter,
            )

            return HttpExporter(endpoint)
    except ModuleNotFoundError as error:
        raise ValueError(
            f"otlp_traces_endpoint needs {error.name}; install it with pip install 'jaxinfer[otlp]'."
        ) from error
    raise ValueError(f"{_PROTOCOL_VARIABLE} must be grpc or http/protobuf, got {protocol!r}.")


class Tracing:
    """An `AsyncLLM`'s observer. Spans continue the trace of a request's `traceparent` header, and are exported in the
    background; `shutdown` sends what is left."""

    def __init__(self, exporter: SpanExporter, model: str) -> None:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        name = os.environ.get("OTEL_SERVICE_NAME", "jaxinfer")
        self._provider = TracerProvider(resource=Resource.create({"service.name": name}))
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("jaxinfer.llm_engine")
        self._model = model
        self._epoch = time.time() - time.monotonic()
        self._contexts: dict[str, Context] = {}
        """Of unfinished requests, by the id of their first completion, which is unique."""
        self._failed: set[str] = set()

    def request_added(self, request: PreparedRequest) -> None:
        from opentelemetry.context import get_current

        self._contexts[request.core_requests[0].request_id] = get_current()

    def step(self, outputs: EngineCoreOutputs) -> None:
        pass

    def request_output(self, request: PreparedRequest, output: RequestOutput) -> None:
        key = request.core_requests[0].request_id
        if any(c.finish_reason == str(FinishReason.ERROR) for c in output.outputs):
            self._failed.add(key)
        if not output.finished:
            return
        from opentelemetry.trace import SpanKind, Status, StatusCode

        metrics = output.metrics
        end = None if metrics is None else metrics.finished_time
        span = self._tracer.start_span(
            SPAN,
            context=self._contexts.pop(key, None),
            kind=SpanKind.SERVER,
            start_time=self._wall(request.arrival_time),
            attributes=_attributes(request, output) | {"gen_ai.response.model": self._model},
        )
        if key in self._failed:
            self._failed.discard(key)
            span.set_status(Status(StatusCode.ERROR))
        span.end(self._wall(time.monotonic() if end is None else end))

    def shutdown(self) -> None:
        self._provider.shutdown()

    def _wall(self, moment: float) -> int:
        """Nanoseconds since 1970 of a `time.monotonic` moment."""
        return int((self._epoch + moment) * 1e9)


def _attributes(request: PreparedRequest, output: RequestOutput) -> dict[str, Any]:
    """Latencies in seconds, those that are known."""
    params = request.sampling_params
    found: dict[str, Any] = {
        "gen_ai.request.id": request.request_id,
        "gen_ai.request.n": params.n,
        "gen_ai.request.temperature": params.temperature,
        "gen_ai.request.top_p": params.top_p,
        "gen_ai.request.max_tokens": params.max_tokens,
        "gen_ai.usage.prompt_tokens": len(request.prompt_token_ids),
    }
    if (metrics := output.metrics) is not None:
        scheduled = metrics.first_scheduled_time
        first, last = metrics.first_token_time, metrics.last_token_time
        found |= {
            "gen_ai.usage.completion_tokens": metrics.num_generation_tokens,
            "gen_ai.latency.time_in_queue": metrics.time_in_queue,
            "gen_ai.latency.time_to_first_token": metrics.time_to_first_token,
            "gen_ai.latency.e2e": metrics.e2e_latency,
        }
        if scheduled is not None and first is not None and last is not None:
            found |= {
                "gen_ai.latency.time_in_model_prefill": first - scheduled,
                "gen_ai.latency.time_in_model_decode": last - first,
                "gen_ai.latency.time_in_model_inference": last - scheduled,
            }
    return {name: value for name, value in found.items() if value is not None}


@contextlib.contextmanager
def open_tracing(settings: ServerSettings) -> Iterator[Tracing | None]:
    """None where no traces are wanted. Raises as `otlp_exporter`."""
    if settings.otlp_traces_endpoint is None:
        yield None
        return
    exporter = otlp_exporter(settings.otlp_traces_endpoint)
    tracing = Tracing(exporter, settings.served_model_name[0])
    try:
        yield tracing
    finally:
        tracing.shutdown()


class TraceContext:
    """ASGI: what a request starts belongs to the trace that its headers name (W3C Trace Context)."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        from opentelemetry import context
        from opentelemetry.propagate import extract

        token = context.attach(extract(dict(Headers(scope=scope))))
        try:
            await self._app(scope, receive, send)
        finally:
            context.detach(token)


class Observers:
    """Several observers as one."""

    def __init__(self, *observers: Any) -> None:
        self._observers = observers

    def request_added(self, request: PreparedRequest) -> None:
        for observer in self._observers:
            observer.request_added(request)

    def request_output(self, request: PreparedRequest, output: RequestOutput) -> None:
        for observer in self._observers:
            observer.request_output(request, output)

    def step(self, outputs: EngineCoreOutputs) -> None:
        for observer in self._observers:
            observer.step(outputs)
