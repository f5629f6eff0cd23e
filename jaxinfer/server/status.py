"""What operators and load balancers ask: `/health`, `/ping`, `/version`, `/load`, `/metrics`, `/v1/models`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from fastapi import APIRouter, Response
from fastapi.responses import PlainTextResponse

from jaxinfer.lora_request import LoRARequest
from jaxinfer.metrics import Metric
from jaxinfer.server.errors import json_response
from jaxinfer.server.metrics import CONTENT_TYPE, Metrics
from jaxinfer.server.serving import Serving, now


class Numbers(Protocol):
    """Of the whole server, however many processes it has."""

    async def metrics(self) -> bytes:
        """In Prometheus' text format."""
        ...

    async def counts(self) -> Sequence[Metric]:
        """The counters and histograms among them."""
        ...

    async def num_active(self) -> int:
        """Requests that are being answered."""
        ...


class OwnNumbers:
    """Where this process is all there is."""

    def __init__(self, serving: Serving) -> None:
        self._serving = serving
        llm = serving.llm
        self._metrics = Metrics(llm.metrics, lambda core: llm.check_health(core))

    async def metrics(self) -> bytes:
        return self._metrics.render()

    async def counts(self) -> Sequence[Metric]:
        return self._serving.llm.metrics.snapshot()

    async def num_active(self) -> int:
        return self._serving.num_active


def router(serving: Serving, numbers: Numbers) -> APIRouter:
    routes = APIRouter()
    created = now()

    @routes.get("/health", response_class=Response)
    async def health() -> Response:
        """200 with an empty body, 503 once the engine has died."""
        serving.llm.check_health()
        return Response()

    @routes.get("/ping", response_class=Response)
    async def ping() -> Response:
        return await health()

    @routes.get("/version", response_model=None)
    def version() -> Response:
        import jaxinfer

        return json_response({"version": jaxinfer.__version__})

    @routes.get("/load", response_model=None)
    async def load() -> Response:
        """Requests that are being answered."""
        return json_response({"server_load": await numbers.num_active()})

    @routes.get("/metrics", response_class=PlainTextResponse)
    async def show_metrics() -> Response:
        return Response(await numbers.metrics(), media_type=CONTENT_TYPE)

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

    def adapter_card(adapter: LoRARequest) -> dict[str, object]:
        more = {"root": adapter.lora_path, "parent": serving.model}
        return card(adapter.lora_name) | more

    @routes.get("/v1/models", response_model=None)
    def models() -> Response:
        cards = [card(name) for name in serving.settings.served_model_name]
        cards += [adapter_card(adapter) for adapter in serving.adapters.all]
        return json_response({"object": "list", "data": cards})

    @routes.get("/v1/models/{name:path}", response_model=None)
    def model(name: str) -> Response:
        adapter = serving.adapter(name)
        return json_response(card(name) if adapter is None else adapter_card(adapter))

    return routes
