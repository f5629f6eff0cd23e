"""What operators and load balancers ask: `/health`, `/ping`, `/version`, `/load`, `/metrics`, `/v1/models`."""

from __future__ import annotations

from fastapi import APIRouter, Response

from jaxinfer.server.errors import json_response
from jaxinfer.server.metrics import CONTENT_TYPE, Metrics
from jaxinfer.server.serving import Serving, now


def router(serving: Serving, metrics: Metrics) -> APIRouter:
    routes = APIRouter()
    created = now()

    @routes.get("/health", response_model=None)
    async def health() -> Response:
        """200 with an empty body, 503 once the engine has died."""
        serving.llm.check_health()
        return Response()

    @routes.get("/ping", response_model=None)
    async def ping() -> Response:
        return await health()

    @routes.get("/version", response_model=None)
    def version() -> Response:
        import jaxinfer

        return json_response({"version": jaxinfer.__version__})

    @routes.get("/load", response_model=None)
    async def load() -> Response:
        """Requests that are being answered."""
        return json_response({"server_load": serving.num_active})

    @routes.get("/metrics", response_model=None)
    async def show_metrics() -> Response:
        return Response(metrics.render(), media_type=CONTENT_TYPE)

    def card(name: str) -> dict[str, object]:
        return {
            "id": name,
            "object": "model",
            "created": created,
            "owned_by": "jaxinfer",
            "root": serving.llm.config.model.model,
            "parent": None,
            "max_model_len": serving.max_model_len,
        }

    @routes.get("/v1/models", response_model=None)
    def models() -> Response:
        names = serving.settings.served_model_name
        return json_response({"object": "list", "data": [card(name) for name in names]})

    @routes.get("/v1/models/{name:path}", response_model=None)
    def model(name: str) -> Response:
        serving.check_model(name)
        return json_response(card(name))

    return routes
