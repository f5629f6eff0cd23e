"""`/v1/responses`: a conversation that the server may remember, answered by items."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any
from uuid import uuid4

import msgspec
from fastapi import APIRouter, Request, Response

from jaxinfer.outputs import CompletionOutput, RequestOutput
from jaxinfer.request_stream import RequestStream
from jaxinfer.server.chat_run import ChatRun
from jaxinfer.server.deadline import Deadline
from jaxinfer.server.errors import ApiError, json_response
from jaxinfer.server.message_parser import MessageFields, MessagePiece
from jaxinfer.server.named_events import NamedEventStream
from jaxinfer.server.protocol.responses import ResponsesRequest
from jaxinfer.server.response_items import Event, ResponseItems
from jaxinfer.server.response_store import (
    OwnResponses,
    ResponseStore,
    StoredResponse,
    StoredResponses,
)
from jaxinfer.server.serving import Serving, final_outputs, now, until_disconnect
from jaxinfer.server.streaming import RESPONSES, Chunks


def router(serving: Serving, stored: StoredResponses | None) -> APIRouter:
    """`stored` is this process's own where None is given."""
    routes = APIRouter()
    settings = serving.settings
    store = stored or OwnResponses(
        ResponseStore(settings.max_stored_responses, settings.max_stored_response_bytes)
    )

    @routes.post("/v1/responses", response_model=None, responses=RESPONSES)
    async def create(request: ResponsesRequest, http: Request) -> Response:
        serving.check_model(request.model)
        try:
            call = _Call(serving, store, request, await _history(store, request))
            deadline = Deadline.of(http, call.chat)
            stream = await call.run.start()
        except ApiError as error:
            raise request.renamed(error) from error
        if request.stream:
            return NamedEventStream(call.events(stream), deadline.watch([stream]), call.error_event)
        outputs = await until_disconnect(http, lambda: deadline.wait(final_outputs([stream])))
        return (
            Response(status_code=499)
            if outputs is None
            else json_response(await call.body(outputs[0]))
        )

    @routes.get("/v1/responses/{response_id}", response_model=None)
    async def retrieve(response_id: str) -> Response:
        found = await store.get(response_id)
        if found is None:
            raise _not_found(response_id, "response_id")
        return Response(found.body, media_type="application/json")

    @routes.delete("/v1/responses/{response_id}", response_model=None)
    async def delete(response_id: str) -> Response:
        if not await store.remove(response_id):
            raise _not_found(response_id, "response_id")
        return json_response({"id": response_id, "object": "response", "deleted": True})

    return routes


def _not_found(id: str, param: str) -> ApiError:
    return ApiError(
        HTTPStatus.NOT_FOUND,
        f"There is no response {id!r:.100}: it was not stored, was deleted, or had to make room for others.",
        kind="not_found_error",
        param=param,
    )


async def _history(store: StoredResponses, request: ResponsesRequest) -> list[dict[str, Any]]:
    """The conversation that the request goes on from."""
    id = request.previous_response_id
    if id is None:
        return []
    found = await store.get(id)
    if found is None:
        raise _not_found(id, "previous_response_id")
    history: list[dict[str, Any]] = msgspec.json.decode(found.messages)
    return history


class _Call:
    def __init__(
        self,
        serving: Serving,
        store: StoredResponses,
        request: ResponsesRequest,
        history: list[dict[str, Any]],
    ) -> None:
        self._serving = serving
        self._store = store
        self._request = request
        self._id = f"resp_{uuid4().hex}"
        self._created = now()
        self._model = serving.reported(request.model)
        self._messages = history + request.messages()
        self.chat = request.chat(self._messages)
        self.run = ChatRun(serving, self.chat, self._id)
        self._items = ResponseItems()
        self._answer = MessageFields(is_delta=False)
        self._number = 0

    def _take(self, completion: CompletionOutput) -> list[Event]:
        pieces: list[MessagePiece] = self.run.pieces(completion)
        self._answer.add(pieces)
        events = list(self._items.add(pieces))
        if completion.finish_reason is not None:
            status = "incomplete" if completion.finish_reason == "length" else "completed"
            events += self._items.finish(status)
        return events

    async def body(self, output: RequestOutput) -> dict[str, Any]:
        self.run.count(output)
        [completion] = output.outputs
        self._take(completion)
        return await self._finished(completion)

    async def _finished(self, completion: CompletionOutput) -> dict[str, Any]:
        if completion.finish_reason == "length":
            reason = {"reason": "max_output_tokens"}
            body = self._body("incomplete") | {"incomplete_details": reason}
        else:
            body = self._body("completed")
        body |= {"usage": self._usage(), "completed_at": now()}
        if self._stores:
            answer = self._answer.message()
            stored = StoredResponse.of(body, [*self._messages, answer])
            await self._store.keep(self._id, stored)
        return body

    @property
    def _stores(self) -> bool:
        return self._request.store is not False and self._serving.settings.max_stored_responses > 0

    def _usage(self) -> dict[str, Any]:
        usage = self.run.usage
        return {
            "input_tokens": usage.num_prompt,
            "input_tokens_details": {
                "cached_tokens": usage.num_cached,
                "cache_write_tokens": 0,
            },
            "output_tokens": usage.num_completion,
            "output_tokens_details": {"reasoning_tokens": usage.num_reasoning or 0},
            "total_tokens": usage.num_prompt + usage.num_completion,
        }

    def _body(self, status: str) -> dict[str, Any]:
        request, defaults = self._request, self._serving.llm.processor.sampling_defaults
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens,
            "metadata": request.metadata or {},
            "model": self._model,
            "output": self._items.output,
            "parallel_tool_calls": request.parallel_tool_calls is not False,
            "previous_response_id": request.previous_response_id,
            "reasoning": {"effort": None, "summary": None} | (request.reasoning or {}),
            "store": self._stores,
            "temperature": _given(request.temperature, defaults.get("temperature", 1.0)),
            "text": {"format": {"type": "text"}} | (request.text or {}),
            "tool_choice": request.tool_choice or "auto",
            "tools": request.tools or [],
            "top_p": _given(request.top_p, defaults.get("top_p", 1.0)),
            "truncation": "disabled",
            "usage": None,
        }

    async def events(self, stream: RequestStream) -> Chunks:
        for kind in ("response.created", "response.in_progress"):
            yield self._numbered({"type": kind, "response": self._body("in_progress")})
        async for output in stream:
            self.run.count(output)
            for completion in output.outputs:
                for event in self._take(completion):
                    yield self._numbered(event)
                if completion.finish_reason is not None:
                    body = await self._finished(completion)
                    kind = f"response.{body['status']}"
                    yield self._numbered({"type": kind, "response": body})

    def _numbered(self, event: Event) -> Event:
        self._number += 1
        return event | {"sequence_number": self._number - 1}

    def error_event(self, error: ApiError) -> Event:
        code = "server_error" if error.status >= 500 else "invalid_prompt"
        fields = {"code": code, "message": error.message, "param": error.param}
        return self._numbered({"type": "error"} | fields)


def _given[T](value: T | None, default: T) -> T:
    return default if value is None else value
