"""Sends requests at their times of arrival, and collects what came of them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext

from jaxinfer.bench.client import StreamingClient
from jaxinfer.bench.datasets import BenchRequest
from jaxinfer.bench.timeline import Timeline


async def run_load(
    client: StreamingClient,
    requests: Sequence[BenchRequest],
    arrivals: Sequence[float],
    max_concurrency: int | None = None,
    on_done: Callable[[], object] = lambda: None,
) -> tuple[list[Timeline], float]:
    """Timelines in the requests' order, and the seconds from the start until the last request ended.

    Request i is sent `arrivals[i]` seconds after the start, or later when `max_concurrency` others run then; a request's
    own latencies begin when it is sent.
    """
    place: AbstractAsyncContextManager[object] = (
        nullcontext() if max_concurrency is None else asyncio.Semaphore(max_concurrency)
    )
    start = time.perf_counter()

    async def send(request: BenchRequest, arrival: float) -> Timeline:
        await asyncio.sleep(start + arrival - time.perf_counter())
        async with place:
            timeline = await client.send(request)
        on_done()
        return timeline

    async with asyncio.TaskGroup() as group:
        tasks = [
            group.create_task(send(request, arrival))
            for request, arrival in zip(requests, arrivals, strict=True)
        ]
    return [task.result() for task in tasks], time.perf_counter() - start
