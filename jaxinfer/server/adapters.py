"""The adapters that requests may name as their model, and the routes by which they come and go while the server runs."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import TYPE_CHECKING

from fastapi import APIRouter
from fastapi.responses import PlainTextResponse, Response
from pydantic import BaseModel, ConfigDict, Field

from jaxinfer.async_llm import AsyncLLM
from jaxinfer.lora_request import LoRARequest
from jaxinfer.server.errors import ApiError, BadRequest

if TYPE_CHECKING:
    from jaxinfer.server.serving import Serving


@dataclass(slots=True)
class ServedAdapters:
    """By the names that requests use. A name has the same `lora_int_id` in all processes of a server, and `on_change` lets
    them know: it is called with a name, and the folder that it stands for now or None."""

    llm: AsyncLLM
    model_names: tuple[str, ...]
    """What adapters can't be called."""
    on_change: Callable[[str, str | None], None] = lambda name, path: None
    _by_name: dict[str, LoRARequest] = field(default_factory=dict)
    _changing: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def all(self) -> list[LoRARequest]:
        return list(self._by_name.values())

    def get(self, name: str) -> LoRARequest | None:
        return self._by_name.get(name)

    async def load(self, name: str, path: str) -> None:
        """Also again, for requests from now on. Raises `ValueError` for an adapter that doesn't fit the model."""
        if name in self.model_names:
            raise ValueError(f"lora_name {name!r} is the model's own name.")
        adapter = _adapter(name, path)
        async with self._changing:
            await self.llm.add_lora(adapter)
            self._by_name[name] = adapter
        self.on_change(name, path)

    async def unload(self, name: str) -> bool:
        """What runs or waits with it goes on. False: there is none."""
        async with self._changing:
            adapter = self._by_name.pop(name, None)
            if adapter is None:
                return False
            await self.llm.remove_lora(adapter.lora_int_id)
        self.on_change(name, None)
        return True

    def heard(self, name: str, path: str | None) -> None:
        """Another process has loaded it from `path`, or unloaded it."""
        if path is None:
            self._by_name.pop(name, None)
        else:
            self._by_name[name] = _adapter(name, path)


def _adapter(name: str, path: str) -> LoRARequest:
    number = int.from_bytes(hashlib.sha256(name.encode()).digest()[:6]) + 1
    return LoRARequest(name, number, path)


class LoadRequest(BaseModel):
    model_config = ConfigDict(extra="forbid")

    lora_name: str = Field(min_length=1)
    lora_path: str = Field(min_length=1)
    load_inplace: bool = False
    """Whether an adapter of this name may be there already."""


class UnloadRequest(BaseModel):
    model_config = ConfigDict(extra="forbid")

    lora_name: str = Field(min_length=1)
    lora_int_id: int | None = None
    """Of no effect: names are enough."""


def router(serving: Serving) -> APIRouter:
    routes = APIRouter()
    adapters = serving.adapters

    @routes.post("/v1/load_lora_adapter", response_model=None)
    async def load_lora_adapter(request: LoadRequest) -> Response:
        """Read an adapter from a folder on the server's machine; requests may name it as their model then."""
        name = request.lora_name
        if adapters.get(name) is not None and not request.load_inplace:
            raise BadRequest(
                f"lora_name: {name!r} is loaded already; load_inplace=true reads it again.",
                param="lora_name",
            )
        try:
            await adapters.load(name, request.lora_path)
        except ValueError as error:
            param = "lora_name" if str(error).startswith("lora_name") else "lora_path"
            raise BadRequest(str(error), param=param) from error
        return PlainTextResponse(f"The LoRA adapter {name!r} is loaded.")

    @routes.post("/v1/unload_lora_adapter", response_model=None)
    async def unload_lora_adapter(request: UnloadRequest) -> Response:
        """Requests can't name it any more; those that have begun end with it."""
        name = request.lora_name
        if not await adapters.unload(name):
            raise ApiError(
                HTTPStatus.NOT_FOUND,
                f"The LoRA adapter {name!r} is not loaded.",
                kind="not_found_error",
                param="lora_name",
            )
        return PlainTextResponse(f"The LoRA adapter {name!r} is unloaded.")

    return routes
