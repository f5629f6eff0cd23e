"""Flags of `jaxinfer serve`, beside the engine's: vLLM's names. Imports nothing that a plain install lacks."""

from __future__ import annotations

import argparse
import importlib
import inspect
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxinfer.config import HEARTBEAT_TIMEOUT, DataParallelRouting
from jaxinfer.engine_args import EngineArgs
from jaxinfer.server.adapter_args import RUNTIME_VARIABLE, adapter_settings, add_adapter_args
from jaxinfer.server.parser_args import add_parser_args, parser_settings
from jaxinfer.server.process_args import add_process_args, check_process_args
from jaxinfer.server.settings import ServerSettings

API_KEY_VARIABLE = "JAXINFER_API_KEY"
DEV_MODE_VARIABLE = "JAXINFER_SERVER_DEV_MODE"


@dataclass(frozen=True, slots=True)
class ListenArgs:
    """Where and how to listen. `shutdown_timeout` seconds are given to requests that run when SIGTERM comes.
    `timeout_keep_alive`: seconds for which a connection may be idle; longer than clients and proxies keep theirs, or
    they would use one that is being closed. `engine_heartbeat_timeout`: see `CoreProcess`. `data_parallel_routing`: see `LoadBalancer`.
    `api_server_count` processes answer HTTP."""

    host: str = "127.0.0.1"
    port: int = 8000
    uds: str | None = None
    root_path: str = ""
    uvicorn_log_level: str = "info"
    disable_uvicorn_access_log: bool = False
    ssl_keyfile: str | None = None
    ssl_certfile: str | None = None
    ssl_ca_certs: str | None = None
    ssl_cert_reqs: int = 0
    ssl_ciphers: str | None = None
    enable_ssl_refresh: bool = False
    shutdown_timeout: int = 30
    timeout_keep_alive: int = 75
    restart_engine: bool = False
    engine_heartbeat_timeout: float = HEARTBEAT_TIMEOUT
    data_parallel_routing: DataParallelRouting = "load"
    api_server_count: int = 1


def add_server_args(parser: argparse.ArgumentParser) -> None:
    default = ListenArgs()
    listen = parser.add_argument_group("server")
    listen.add_argument(
        "--host", default=default.host, help="0.0.0.0 for all interfaces (default: %(default)s)"
    )
    listen.add_argument("--port", type=int, default=default.port, help="(default: %(default)s)")
    listen.add_argument("--uds", metavar="PATH", help="listen on a Unix socket instead")
    listen.add_argument(
        "--api-key",
        nargs="+",
        metavar="KEY",
        help=f"keys that open /v1; without, everything is open (or ${API_KEY_VARIABLE})",
    )
    _add_model_names(listen)
    listen.add_argument(
        "--max-num-queued-reqs",
        type=int,
        metavar="N",
        help="completions that may wait before more are refused with 503",
    )
    listen.add_argument(
        "--shutdown-timeout",
        type=int,
        default=default.shutdown_timeout,
        metavar="SECONDS",
        help="for running requests to finish after SIGTERM (default: %(default)s)",
    )

    add_process_args(parser, default)
    _add_chat_args(parser)

    traces = parser.add_argument_group("traces")
    traces.add_argument(
        "--otlp-traces-endpoint",
        metavar="URL",
        help="send a span per request to this OpenTelemetry collector; needs jaxinfer[otlp]",
    )

    http = parser.add_argument_group("HTTP")
    http.add_argument("--root-path", default="", help="path under which a proxy serves this")
    for name in ("origins", "methods", "headers"):
        http.add_argument(
            f"--allowed-{name}",
            type=_json(list),
            default=["*"],
            metavar="JSON",
            help='for browsers of other sites, a JSON list (default: ["*"])',
        )
    for name, text in (
        ("allow-credentials", "let browsers of other sites send credentials"),
        ("enable-request-id-headers", "answer with an X-Request-Id"),
        ("enable-tokenizer-info-endpoint", "say at /tokenizer_info what texts become tokens by"),
        ("enable-force-include-usage", "streams end with their usage, asked for or not"),
        ("disable-fastapi-docs", "no /docs and /openapi.json"),
        ("disable-page", "no page at /, and no /anatomy, which feeds it"),
        ("disable-uvicorn-access-log", "log no line per request"),
    ):
        http.add_argument(f"--{name}", action="store_true", help=text)
    http.add_argument(
        "--timeout-keep-alive",
        type=int,
        default=default.timeout_keep_alive,
        metavar="SECONDS",
        help="for which a connection may be idle (default: %(default)s)",
    )
    http.add_argument(
        "--uvicorn-log-level",
        default=default.uvicorn_log_level,
        choices=("critical", "error", "warning", "info", "debug", "trace"),
        help="(default: %(default)s)",
    )
    for name, text in (
        ("ssl-keyfile", "private key of the certificate"),
        ("ssl-certfile", "certificate, which makes it https"),
        ("ssl-ca-certs", "authorities of clients' certificates"),
    ):
        http.add_argument(f"--{name}", metavar="FILE", help=text)
    http.add_argument(
        "--ssl-cert-reqs",
        type=int,
        default=0,
        metavar="N",
        help="0: no client certificates, 1: optional, 2: required",
    )
    http.add_argument("--ssl-ciphers", metavar="LIST", help="in OpenSSL's notation")
    http.add_argument(
        "--enable-ssl-refresh",
        action="store_true",
        help="use certificates that change while the server runs",
    )
    http.add_argument(
        "--middleware",
        action="append",
        default=[],
        metavar="MODULE:OBJECT",
        help="ASGI middleware class, or coroutine function (request, call_next); may be repeated",
    )
    http.add_argument(
        "--enable-log-requests",
        action="store_true",
        help="log a line per request: its parameters, and how long its prompt is",
    )
    http.add_argument(
        "--disable-log-requests",
        action="store_false",
        dest="enable_log_requests",
        help="log none (the default)",
    )
    http.add_argument(
        "--max-log-len",
        type=int,
        default=0,
        metavar="N",
        help="characters of a prompt, or of its token ids, in the line of a request (default: %(default)s)",
    )


def add_batch_args(parser: argparse.ArgumentParser) -> None:
    """Of `jaxinfer run-batch`."""
    batch = parser.add_argument_group("batch")
    for short, name, text in (
        ("-i", "input-file", "requests, a JSON object per line, in OpenAI's batch format"),
        ("-o", "output-file", "where answers are written, a line each, as they come"),
    ):
        batch.add_argument(short, f"--{name}", required=True, metavar="FILE", help=text)
    batch.add_argument(
        "--max-concurrency",
        type=int,
        metavar="N",
        help="most requests under way (default: twice --max-num-seqs)",
    )
    _add_model_names(batch)
    _add_chat_args(parser)


def _add_model_names(section: Any) -> None:
    section.add_argument(
        "--served-model-name",
        dest="served_model_names",
        nargs="+",
        metavar="NAME",
        help="names of the model in requests, the first in answers (default: MODEL)",
    )


def _add_chat_args(parser: argparse.ArgumentParser) -> None:
    chat = parser.add_argument_group("chat")
    chat.add_argument("--chat-template", metavar="TEMPLATE", help="a file, or the template itself")
    chat.add_argument(
        "--default-chat-template-kwargs",
        type=_json(dict),
        default={},
        metavar="JSON",
        help="variables for the template, which requests may override",
    )
    chat.add_argument(
        "--trust-request-chat-template",
        action="store_true",
        help="let requests bring templates of their own",
    )
    chat.add_argument("--response-role", default="assistant", help="(default: %(default)s)")
    add_parser_args(parser)
    add_adapter_args(parser)


def listen_args(parsed: argparse.Namespace) -> ListenArgs:
    """Raises `ValueError` for what can't be listened on."""
    if not 0 <= parsed.port < 65536:
        raise ValueError(f"port must be in [0, 65535], got {parsed.port}.")
    if parsed.shutdown_timeout < 0:
        raise ValueError(f"shutdown_timeout must be at least 0, got {parsed.shutdown_timeout}.")
    if parsed.timeout_keep_alive < 0:
        raise ValueError(f"timeout_keep_alive must be at least 0, got {parsed.timeout_keep_alive}.")
    check_process_args(parsed)
    for name in ("ssl_keyfile", "ssl_certfile", "ssl_ca_certs"):
        path = getattr(parsed, name)
        if path is not None and not Path(path).is_file():
            raise ValueError(f"{name}: there is no file {path}.")
    if parsed.enable_ssl_refresh and parsed.ssl_certfile is None:
        raise ValueError("enable_ssl_refresh needs an ssl_certfile.")
    return ListenArgs(**{name: getattr(parsed, name) for name in ListenArgs.__slots__})


def server_settings(parsed: argparse.Namespace, args: EngineArgs) -> ServerSettings:
    """Raises `ValueError` for a template or a middleware that can't be found."""
    if parsed.max_num_queued_reqs is not None and parsed.max_num_queued_reqs < 0:
        raise ValueError(
            f"max_num_queued_reqs must be at least 0, got {parsed.max_num_queued_reqs}."
        )
    if parsed.max_log_len < 0:
        raise ValueError(f"max_log_len must be at least 0, got {parsed.max_log_len}.")
    key = os.environ.get(API_KEY_VARIABLE)
    return ServerSettings(
        **_model_and_chat(parsed, args),
        api_key=tuple(parsed.api_key or ([key] if key else [])),
        allowed_origins=tuple(parsed.allowed_origins),
        allowed_methods=tuple(parsed.allowed_methods),
        allowed_headers=tuple(parsed.allowed_headers),
        middleware=tuple(load_middleware(path) for path in parsed.middleware),
        middleware_paths=tuple(parsed.middleware),
        dev_mode=_is_set(DEV_MODE_VARIABLE),
        runtime_lora=_runtime_lora(args),
        **{
            name: getattr(parsed, name)
            for name in (
                "allow_credentials",
                "enable_request_id_headers",
                "enable_force_include_usage",
                "enable_tokenizer_info_endpoint",
                "disable_fastapi_docs",
                "disable_page",
                "enable_log_requests",
                "max_log_len",
                "max_num_queued_reqs",
                "otlp_traces_endpoint",
            )
        },
    )


def batch_settings(parsed: argparse.Namespace, args: EngineArgs) -> ServerSettings:
    """Raises `ValueError` for a template that can't be found, and for no concurrency at all."""
    if parsed.max_concurrency is not None and parsed.max_concurrency < 1:
        raise ValueError(f"max_concurrency must be at least 1, got {parsed.max_concurrency}.")
    return ServerSettings(**_model_and_chat(parsed, args))


def _model_and_chat(parsed: argparse.Namespace, args: EngineArgs) -> dict[str, Any]:
    names = ("default_chat_template_kwargs", "trust_request_chat_template", "response_role")
    return {
        "served_model_name": tuple(parsed.served_model_names or [args.model]),
        "chat_template": _chat_template(parsed.chat_template),
        **parser_settings(parsed),
        **adapter_settings(parsed, args),
        **{name: getattr(parsed, name) for name in names},
    }


def _is_set(variable: str) -> bool:
    value = os.environ.get(variable, "0")
    if value not in ("0", "1"):
        raise ValueError(f"${variable} must be 0 or 1, got {value!r}.")
    return value == "1"


def _runtime_lora(args: EngineArgs) -> bool:
    if not _is_set(RUNTIME_VARIABLE):
        return False
    if not args.enable_lora:
        raise ValueError(f"${RUNTIME_VARIABLE} needs enable_lora.")
    return True


def load_middleware(path: str) -> Any:
    """Raises `ValueError` where there is none."""
    module, colon, name = path.partition(":")
    if not (module and colon and name):
        raise ValueError(f"middleware must have the form MODULE:OBJECT, got {path!r}.")
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"middleware: can't import {path!r}: {error}") from error
    if not inspect.isclass(found) and not inspect.iscoroutinefunction(found):
        raise ValueError(f"middleware: {path!r} is neither a class nor a coroutine function.")
    return found


def _chat_template(given: str | None) -> str | None:
    if given is None:
        return None
    if "{" in given or "\n" in given:
        return given
    path = Path(given).expanduser()
    if not path.is_file():
        raise ValueError(f"chat_template: {given!r} is neither a file nor a template.")
    return path.read_text(encoding="utf-8")


def _json(kind: type) -> Any:
    def read(text: str) -> Any:
        try:
            value = json.loads(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"not valid JSON: {error}") from None
        if not isinstance(value, kind):
            raise argparse.ArgumentTypeError(f"must be a JSON {kind.__name__}")
        return value

    return read
