"""What an operator chooses about the server itself; the engine has `EngineArgs`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from jaxinfer.frontend.plugins import Registry
from jaxinfer.frontend.reasoning_parsers import reasoning_parsers
from jaxinfer.frontend.tool_parsers import tool_parsers


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """vLLM's names and meanings. `served_model_name`: the names a request may use, the first is reported.

    `max_num_queued_reqs`: completions that may wait while all `max_num_seqs` run; more are refused with 503.
    `middleware`: ASGI middleware classes, or coroutine functions `(request, call_next)`; `middleware_paths`: where they
    were found, and `plugins`: files that were run for their parsers, for another process. `dev_mode`: the routes of
    `server.dev_mode`. `otlp_traces_endpoint`: the URL of an OpenTelemetry collector that gets a span per request.
    `tool_call_parser`, `reasoning_parser`: names of `jaxinfer.frontend`'s parsers. `max_log_len`: how much of a prompt is
    logged, in characters or token ids. `max_body_bytes`: longer bodies are refused with 413.
    `enable_tokenizer_info_endpoint`: whether clients may read the chat template. `lora_modules`: names and folders of adapters
    that are there from the start; with `runtime_lora`, there are routes by which others come and go.
    `max_stored_responses`, `max_stored_response_bytes`: what is kept of `/v1/responses`, for requests that go on from it.
    """

    served_model_name: tuple[str, ...]
    api_key: tuple[str, ...] = ()
    chat_template: str | None = None
    default_chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    trust_request_chat_template: bool = False
    response_role: str = "assistant"
    enable_auto_tool_choice: bool = False
    tool_call_parser: str | None = None
    exclude_tools_when_tool_choice_none: bool = False
    reasoning_parser: str | None = None
    allowed_origins: tuple[str, ...] = ("*",)
    allowed_methods: tuple[str, ...] = ("*",)
    allowed_headers: tuple[str, ...] = ("*",)
    allow_credentials: bool = False
    enable_request_id_headers: bool = False
    enable_force_include_usage: bool = False
    enable_tokenizer_info_endpoint: bool = False
    disable_fastapi_docs: bool = False
    disable_page: bool = False
    enable_log_requests: bool = False
    max_log_len: int = 0
    max_num_queued_reqs: int | None = None
    middleware: tuple[Any, ...] = ()
    middleware_paths: tuple[str, ...] = ()
    plugins: tuple[str, ...] = ()
    dev_mode: bool = False
    lora_modules: tuple[tuple[str, str], ...] = ()
    runtime_lora: bool = False
    otlp_traces_endpoint: str | None = None
    max_body_bytes: int = 32 * 2**20
    max_stored_responses: int = 1000
    max_stored_response_bytes: int = 64 * 2**20

    def __post_init__(self) -> None:
        """Raises `ValueError` for parsers that aren't there."""
        known: tuple[tuple[str, Registry[Any]], ...] = (
            ("tool_call_parser", tool_parsers),
            ("reasoning_parser", reasoning_parsers),
        )
        for name, registry in known:
            chosen = getattr(self, name)
            if chosen is not None and chosen not in registry.names:
                raise ValueError(
                    f"{name} must be one of {', '.join(registry.names)}, got {chosen!r}."
                )
        if self.enable_auto_tool_choice and self.tool_call_parser is None:
            raise ValueError(
                f"enable_auto_tool_choice needs a tool_call_parser: {', '.join(tool_parsers.names)}."
            )
