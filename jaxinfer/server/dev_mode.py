"""Routes for whoever shares the device with the server (a training loop): only with `$JAXINFER_SERVER_DEV_MODE`=1, as
they ask for no key and stop the service."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, Response

from jaxinfer.server.errors import BadRequest, json_response
from jaxinfer.server.serving import Serving


def router(serving: Serving) -> APIRouter:
    routes = APIRouter()
    llm = serving.llm

    @routes.post("/sleep", response_model=None)
    async def sleep(level: int = 1) -> Response:
        """Free the device's memory; see `LLM.sleep`."""
        try:
            await llm.sleep(level)
        except ValueError as error:
            raise BadRequest(str(error), param="level") from error
        return Response()

    @routes.post("/wake_up", response_model=None)
    async def wake_up(tags: Annotated[list[str] | None, Query()] = None) -> Response:
        """Take back the memory of all or some `tags`: "weights", "kv_cache"."""
        try:
            await llm.wake_up(tags or None)
        except ValueError as error:
            raise BadRequest(str(error), param="tags") from error
        return Response()

    @routes.get("/is_sleeping", response_model=None)
    async def is_sleeping() -> Response:
        return json_response({"is_sleeping": await llm.is_sleeping()})

    @routes.post("/reset_prefix_cache", response_model=None)
    async def reset_prefix_cache() -> Response:
        """Forget all cached prefixes."""
        await llm.reset_prefix_cache()
        return Response()

    return routes
