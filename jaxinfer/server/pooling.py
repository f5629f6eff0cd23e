"""Vectors over HTTP: `/v1/embeddings`, `/pooling` and `/classify`."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from fastapi import APIRouter, Request, Response

from jaxinfer.engine.messages import PoolingTask
from jaxinfer.frontend.pooling import PoolingProcessor
from jaxinfer.frontend.processor import PreparedRequest
from jaxinfer.outputs import RequestOutput
from jaxinfer.pooling_llm import require_pooling
from jaxinfer.scoring import data_of
from jaxinfer.server.chat_prompt import chat_prompt
from jaxinfer.server.deadline import Deadline
from jaxinfer.server.errors import BadRequest, from_value_error, json_response
from jaxinfer.server.protocol.pooling import (
    ClassificationRequest,
    EmbeddingRequest,
    EncodedFields,
    InputFields,
    PoolingFields,
    PoolingRequest,
)
from jaxinfer.server.serving import Serving, final_outputs, now, request_id, until_disconnect


def router(serving: Serving) -> APIRouter:
    routes = APIRouter()

    @routes.post("/v1/embeddings", response_model=None)
    async def embeddings(request: EmbeddingRequest, http: Request) -> Response:
        return await answer_inputs(
            serving, http, request, "embed", "embd", lambda data, i: _encoded(request, data, i)
        )

    @routes.post("/pooling", response_model=None)
    async def pooling(request: PoolingRequest, http: Request) -> Response:
        def entry(data: np.ndarray, index: int) -> dict[str, Any]:
            return {"index": index, "object": "pooling", "data": _numbers(request, data)}

        return await answer_inputs(serving, http, request, request.task, "pool", entry)

    @routes.post("/classify", response_model=None)
    async def classify(request: ClassificationRequest, http: Request) -> Response:
        labels = processor_of(serving, http).config.labels

        def entry(data: np.ndarray, index: int) -> dict[str, Any]:
            return {
                "index": index,
                "label": labels[int(data.argmax())],
                "probs": data.tolist(),
                "num_classes": len(data),
            }

        return await answer_inputs(serving, http, request, "classify", "classify", entry)

    return routes


def processor_of(serving: Serving, http: Request) -> PoolingProcessor:
    """Raises `WrongRunner` where the engine writes tokens."""
    return require_pooling(serving.llm.pooling, http.url.path)


async def answer_inputs(
    serving: Serving,
    http: Request,
    request: InputFields,
    task: PoolingTask | None,
    prefix: str,
    entry: Callable[[np.ndarray, int], dict[str, Any]],
) -> Response:
    """`entry` makes one of the response's `data` of a vector and its index."""
    pooling = processor_of(serving, http)
    serving.check_model(request.model)
    id = f"{prefix}-{request_id(http, request)}"
    conversation = request.conversation()
    inputs: list[Any] = request.inputs
    add_special_tokens = request.add_special_tokens
    if conversation is not None:
        inputs, add_special_tokens = [chat_prompt(serving, conversation)], False
    if request.cache_salt is not None:
        named = ["prompt" if isinstance(text, str) else "prompt_token_ids" for text in inputs]
        inputs = [
            {name: text, "cache_salt": request.cache_salt}
            for name, text in zip(named, inputs, strict=True)
        ]
    more = {"dimensions": request.dimensions} if isinstance(request, EncodedFields) else {}

    def work() -> tuple[Any, list[PreparedRequest]]:
        params = pooling.complete(request.params(**more), task)
        return params, pooling.prepare(inputs, params, id, request.priority, add_special_tokens)

    try:
        params, prepared = await asyncio.to_thread(work)
    except ValueError as error:
        raise explain(error, request, "input" if conversation is None else "messages") from error
    outputs = await run(serving, http, request, prepared)
    if outputs is None:
        return Response(status_code=499)
    data = [entry(pooling.answer(data_of(output), params), i) for i, output in enumerate(outputs)]
    return json_response(
        {
            "id": id,
            "object": "list",
            "created": now(),
            "model": request.model or serving.model,
            "data": data,
            "usage": usage(outputs),
        }
    )


async def run(
    serving: Serving, http: Request, request: PoolingFields, prepared: Sequence[PreparedRequest]
) -> list[RequestOutput] | None:
    """In the order of `prepared`. None: the client left."""
    deadline = Deadline.of(http, request)
    ordered = processor_of(serving, http).in_order(prepared)
    streams = serving.submit(ordered)
    outputs = await until_disconnect(http, lambda: deadline.wait(final_outputs(streams)))
    if outputs is None:
        return None
    by_request = {id(of): output for of, output in zip(ordered, outputs, strict=True)}
    return [by_request[id(of)] for of in prepared]


def explain(error: ValueError, request: PoolingFields, text_field: str) -> BadRequest:
    """What the engine refused, by the name that the field has in the request."""
    known = from_value_error(error, type(request).model_fields)
    if str(error).startswith(("prompt", "The prompt")):
        known.param = text_field
    return known


def usage(outputs: Sequence[RequestOutput]) -> dict[str, Any]:
    count = sum(len(output.prompt_token_ids) for output in outputs)
    return {
        "prompt_tokens": count,
        "total_tokens": count,
        "completion_tokens": 0,
        "prompt_tokens_details": {
            "cached_tokens": sum(output.num_cached_tokens for output in outputs)
        },
    }


def _encoded(request: EncodedFields, data: np.ndarray, index: int) -> dict[str, Any]:
    return {"index": index, "object": "embedding", "embedding": _numbers(request, data)}


def _numbers(request: EncodedFields, data: np.ndarray) -> list[Any] | str:
    if request.encoding_format == "base64":
        return base64.b64encode(data.astype("<f4").tobytes()).decode()
    return data.tolist()
