"""`/anatomy`: what an engine core is doing, for the page at `/` and whoever else wants to look."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, Response

from jaxinfer import metrics
from jaxinfer.frontend.metrics import PREFIX
from jaxinfer.server.errors import BadRequest, json_response
from jaxinfer.server.serving import Serving
from jaxinfer.server.status import Numbers

ANATOMY_PATH = "/anatomy"
_MIN_SECONDS = 0.25
"""Whoever asks sooner gets the same picture again."""
_MAX_SHARE = 0.01
"""Of the core's time, that pictures may take."""

_COUNTERS = (
    "num_preemptions",
    "prefix_cache_queries",
    "prefix_cache_hits",
    "prompt_tokens",
    "generation_tokens",
    "spec_decode_num_draft_tokens",
    "spec_decode_num_accepted_tokens",
)
_HISTOGRAMS = ("time_to_first_token_seconds", "inter_token_latency_seconds")


def router(serving: Serving, numbers: Numbers) -> APIRouter:
    routes = APIRouter()
    pictures = Pictures(serving, numbers)

    @routes.get(ANATOMY_PATH, response_model=None)
    async def anatomy(engine: int = 0) -> Response:
        """Requests, blocks, the last steps and the counts of an engine core; see docs/page.md."""
        if not 0 <= engine < serving.llm.num_cores:
            raise BadRequest(
                f"engine must be in [0, {serving.llm.num_cores}), got {engine}.", param="engine"
            )
        return json_response(await pictures.get(engine), headers={"Cache-Control": "no-store"})

    return routes


@dataclass(slots=True)
class _Picture:
    task: asyncio.Task[dict[str, Any]]
    expires: float


class Pictures:
    """Of each core the latest one. It is taken when somebody asks, for all who ask meanwhile and shortly after."""

    def __init__(self, serving: Serving, numbers: Numbers) -> None:
        self._serving = serving
        self._numbers = numbers
        self._latest: dict[int, _Picture] = {}

    async def get(self, core: int) -> dict[str, Any]:
        """Raises `EngineDeadError`."""
        loop = asyncio.get_running_loop()
        latest = self._latest.get(core)
        if latest is None or (latest.task.done() and loop.time() >= latest.expires):
            latest = self._latest[core] = _Picture(loop.create_task(self._take(core)), 0.0)
        # Who leaves early doesn't take it from the others.
        picture = await asyncio.shield(latest.task)
        if not latest.expires:
            pause = max(_MIN_SECONDS, picture["took_seconds"] / _MAX_SHARE)
            latest.expires = loop.time() + pause
        return picture

    async def _take(self, core: int) -> dict[str, Any]:
        llm = self._serving.llm
        picture = await llm.anatomy(core)
        config = llm.config
        speculative = config.speculative
        return {
            "engine": core,
            "num_engines": llm.num_cores,
            "model": self._serving.model,
            "limits": {
                "max_num_seqs": config.scheduler.max_num_seqs,
                "max_num_batched_tokens": config.scheduler.max_num_batched_tokens,
                "max_model_len": config.model.max_model_len,
                "block_size": config.cache.block_size,
                "prefix_caching": config.cache.enable_prefix_caching,
                "num_speculative_tokens": speculative.num_speculative_tokens if speculative else 0,
            },
            **picture,
            **_counts(await self._numbers.counts(), core),
        }


def _counts(found: Sequence[metrics.Metric], core: int) -> dict[str, Any]:
    """Since the server started."""
    own = {m.name.removeprefix(PREFIX): m for m in found if m.labels.get("engine") == str(core)}
    counters = {}
    for name in _COUNTERS:
        if isinstance(metric := own.get(name), metrics.Counter):
            counters[name] = metric.value
    histograms = {}
    for name in _HISTOGRAMS:
        if isinstance(metric := own.get(name), metrics.Histogram):
            histograms[name] = _histogram(metric)
    return {"counters": counters, "histograms": histograms}


def _histogram(metric: metrics.Histogram) -> dict[str, Any]:
    """`counts[i]`: how many lie between `bounds[i - 1]` and `bounds[i]`; the last one: beyond all bounds."""
    totals = list(metric.buckets.values())
    return {
        "count": metric.count,
        "sum": metric.sum,
        "bounds": [float(bound) for bound in list(metric.buckets)[:-1]],
        "counts": [total - before for before, total in zip([0, *totals[:-1]], totals, strict=True)],
    }
