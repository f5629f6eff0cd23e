"""What an operator chooses about the server itself; the engine has `EngineArgs`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """vLLM's names and meanings. `served_model_name`: the names a request may use, the first is reported.

    `max_num_queued_reqs`: completions that may wait while all `max_num_seqs` run; more are refused with 503.
    `middleware`: ASGI middleware classes, or coroutine functions `(request, call_next)`. `dev_mode`: the routes of
    `server.dev_mode`. `otlp_traces_endpoint`: the URL of an OpenTelemetry collector that gets a span per request.
    `max_body_bytes`: longer bodies are refused with 413.
    """

    served_model_name: tuple[str, ...]
    api_key: tuple[str, ...] = ()
    chat_template: str | None = None
    default_chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    trust_request_chat_template: bool = False
    response_role: str = "assistant"
    allowed_origins: tuple[str, ...] = ("*",)
    allowed_methods: tuple[str, ...] = ("*",)
    allowed_headers: tuple[str, ...] = ("*",)
    allow_credentials: bool = False
    enable_request_id_headers: bool = False
    enable_force_include_usage: bool = False
    disable_fastapi_docs: bool = False
    enable_log_requests: bool = False
    max_num_queued_reqs: int | None = None
    middleware: tuple[Any, ...] = ()
    dev_mode: bool = False
    otlp_traces_endpoint: str | None = None
    max_body_bytes: int = 32 * 2**20
