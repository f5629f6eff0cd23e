"""How well texts go together: `/score` and `/rerank`, with a cross-encoder or by the cosine of embeddings."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter, Request, Response

from jaxinfer.outputs import RequestOutput
from jaxinfer.scoring import ScorePlan, score_plan
from jaxinfer.server.errors import json_response
from jaxinfer.server.pooling import explain, processor_of, run, usage
from jaxinfer.server.protocol.pooling import PoolingFields, RerankRequest, ScoreRequest
from jaxinfer.server.serving import Serving, now, request_id


def router(serving: Serving) -> APIRouter:
    routes = APIRouter()

    @routes.post("/score", response_model=None)
    @routes.post("/v1/score", response_model=None)
    async def score(request: ScoreRequest, http: Request) -> Response:
        id = f"score-{request_id(http, request)}"
        found = await _scores(
            serving, http, request, (request.data_1, request.data_2), id, ("data_1", "data_2")
        )
        if found is None:
            return Response(status_code=499)
        scores, outputs = found
        return json_response(
            {
                "id": id,
                "object": "list",
                "created": now(),
                "model": request.model or serving.model,
                "data": [
                    {"index": i, "object": "score", "score": value}
                    for i, value in enumerate(scores)
                ],
                "usage": usage(outputs),
            }
        )

    @routes.post("/rerank", response_model=None)
    @routes.post("/v1/rerank", response_model=None)
    @routes.post("/v2/rerank", response_model=None)
    async def rerank(request: RerankRequest, http: Request) -> Response:
        id = f"rerank-{request_id(http, request)}"
        texts = request.texts
        found = await _scores(
            serving, http, request, (request.query, texts), id, ("query", "documents")
        )
        if found is None:
            return Response(status_code=499)
        scores, outputs = found
        best = sorted(range(len(texts)), key=lambda i: -scores[i])[: request.top_n or None]
        results: list[dict[str, Any]] = [
            {"index": i, "relevance_score": scores[i]}
            | ({"document": {"text": texts[i]}} if request.return_documents else {})
            for i in best
        ]
        body = {
            "id": id,
            "model": request.model or serving.model,
            "results": results,
            "usage": usage(outputs),
        }
        return json_response(body)

    return routes


async def _scores(
    serving: Serving,
    http: Request,
    request: PoolingFields,
    texts: tuple[str | list[str], str | list[str]],
    id: str,
    names: tuple[str, str],
) -> tuple[list[float], Sequence[RequestOutput]] | None:
    """Of each pair, and what they were made from; None: the client left. `names`: of the request's fields."""
    pooling = processor_of(serving, http)
    serving.check_model(request.model)

    def work() -> ScorePlan:
        return score_plan(pooling, *texts, request.params(), id, request.priority)

    try:
        plan = await asyncio.to_thread(work)
    except ValueError as error:
        raise explain(error, request, names[1]) from error
    outputs = await run(serving, http, request, plan.prepared)
    return None if outputs is None else (plan.scores(outputs), outputs)
