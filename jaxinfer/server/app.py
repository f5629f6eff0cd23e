"""Puts the HTTP application together."""

from __future__ import annotations

import inspect

from fastapi import Depends, FastAPI
from fastapi.middleware.cors import CORSMiddleware

from jaxinfer.async_llm import AsyncLLM
from jaxinfer.server import (
    adapters,
    anatomy,
    chat,
    completions,
    dev_mode,
    errors,
    messages,
    middleware,
    page,
    pooling,
    responses,
    score,
    status,
    tokens,
)
from jaxinfer.server.response_store import StoredResponses
from jaxinfer.server.serving import Serving
from jaxinfer.server.settings import ServerSettings
from jaxinfer.server.tracing import Observers, TraceContext, Tracing


def build_app(
    llm: AsyncLLM,
    settings: ServerSettings,
    *,
    tracing: Tracing | None = None,
    serving: Serving | None = None,
    numbers: status.Numbers | None = None,
    stored: StoredResponses | None = None,
) -> FastAPI:
    """The application over an engine that runs. It leaves the shutdown of the engine and of `tracing` to its caller.
    `serving`, `numbers` and `stored` are its own where there is no other process."""
    docs = {} if not settings.disable_fastapi_docs else dict(openapi_url=None, docs_url=None)
    app = FastAPI(title="jaxinfer", redoc_url=None, **docs)
    serving = serving or Serving(llm, settings)
    llm.metrics.model_name = serving.model
    if tracing is not None:
        llm.observer = Observers(llm.metrics, tracing)
    numbers = numbers or status.OwnNumbers(serving)
    for router in (
        completions.router(serving),
        chat.router(serving),
        responses.router(serving, stored),
        messages.router(serving),
    ):
        app.include_router(
            router, responses=errors.ERROR_RESPONSES, dependencies=[Depends(serving.check_writes)]
        )
    for router in (
        pooling.router(serving),
        score.router(serving),
        tokens.router(serving),
        status.router(serving, numbers),
    ):
        app.include_router(router, responses=errors.ERROR_RESPONSES)
    if not settings.disable_page:
        app.include_router(page.router())
        app.include_router(anatomy.router(serving, numbers), responses=errors.ERROR_RESPONSES)
    if settings.runtime_lora:
        app.include_router(adapters.router(serving), responses=errors.ERROR_RESPONSES)
    if settings.dev_mode:
        app.include_router(dev_mode.router(serving), responses=errors.ERROR_RESPONSES)
    errors.install(app)
    # The last one added sees a request first.
    app.add_middleware(middleware.ActiveRequests, serving=serving)
    app.add_middleware(middleware.Heads)
    app.add_middleware(middleware.BodyLimit, max_bytes=settings.max_body_bytes)
    if tracing is not None:
        app.add_middleware(TraceContext)
    if settings.api_key:
        app.add_middleware(middleware.ApiKeys, keys=settings.api_key)
    if settings.enable_request_id_headers:
        app.add_middleware(middleware.RequestIds)
    for added in settings.middleware:
        if inspect.isclass(added):
            app.add_middleware(added)
        else:
            app.middleware("http")(added)
    app.add_middleware(
        CORSMiddleware,
        allow_origins=settings.allowed_origins,
        allow_methods=settings.allowed_methods,
        allow_headers=settings.allowed_headers,
        allow_credentials=settings.allow_credentials,
    )
    return app
