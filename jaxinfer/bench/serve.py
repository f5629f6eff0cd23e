"""`jaxinfer bench serve`: a load of requests against an OpenAI-compatible server that runs already."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from tqdm import tqdm

from jaxinfer.bench.arrivals import arrival_times
from jaxinfer.bench.client import StreamingClient, http_client
from jaxinfer.bench.datasets import make_requests
from jaxinfer.bench.load import run_load
from jaxinfer.bench.options import (
    BACKENDS,
    DatasetArgs,
    Traffic,
    dataset_args,
    request_fields,
    traffic_args,
)
from jaxinfer.bench.plot import write_plot
from jaxinfer.bench.report import goodput_limits, latency_names, percentile_list, summarize, text_of
from jaxinfer.bench.timeline import Timeline
from jaxinfer.frontend.tokenizer import Tokenizer
from jaxinfer.weights.resolve import resolve_model

_POLL_SECONDS = 0.5


@dataclass(frozen=True, slots=True)
class Target:
    """A server, and what goes into each request beside its prompt."""

    base_url: str
    endpoint: str
    model: str
    headers: Mapping[str, str]
    fields: Mapping[str, Any]


async def measure(
    target: Target, dataset: DatasetArgs, traffic: Traffic, tokenizer: Tokenizer, progress: bool
) -> tuple[list[Timeline], float]:
    """Timelines and the duration in seconds, after the warm-ups."""
    requests = make_requests(dataset, tokenizer)
    rng = np.random.default_rng([dataset.seed, 1])  # not the stream that the prompts came from
    arrivals = arrival_times(len(requests), traffic.request_rate, traffic.burstiness, rng)
    async with http_client(target.base_url, target.headers) as http:
        await http.get("/v1/models")  # loads what the HTTP client loads when first used
        client = StreamingClient(http, target.endpoint, target.model, target.fields)
        if traffic.num_warmups:
            # Other prompts than those that count, which mustn't find themselves in the prefix cache.
            others = replace(dataset, num_prompts=traffic.num_warmups, seed=dataset.seed + 1)
            warmups = make_requests(others, tokenizer)
            await run_load(client, warmups, [0.0] * len(warmups), traffic.max_concurrency)
        with tqdm(total=len(requests), disable=not progress, unit="req") as bar:
            return await run_load(client, requests, arrivals, traffic.max_concurrency, bar.update)


def run(parsed: argparse.Namespace) -> int:
    """0, or 1 when a request failed."""
    dataset, traffic = dataset_args(parsed), traffic_args(parsed)
    slos, percentiles = goodput_limits(parsed.goodput), percentile_list(parsed.metric_percentiles)
    names = latency_names(parsed.percentile_metrics)
    metadata = dict(_pair("metadata", text) for text in parsed.metadata or ())
    base_url = (parsed.base_url or f"http://{parsed.host}:{parsed.port}").rstrip("/")
    headers = dict(_pair("header", text) for text in parsed.header or ())
    if key := os.environ.get("OPENAI_API_KEY"):
        headers.setdefault("Authorization", f"Bearer {key}")
    card = wait_until_ready(base_url, headers, parsed.ready_check_timeout_sec)
    target = Target(
        base_url,
        parsed.endpoint or BACKENDS[parsed.backend],
        parsed.served_model_name or parsed.model or card["id"],
        headers,
        request_fields(parsed, dataset),
    )
    source = parsed.tokenizer or parsed.model or card.get("root") or card["id"]
    tokenizer = Tokenizer.load(resolve_model(source))
    progress = not parsed.disable_tqdm and sys.stderr.isatty()
    timelines, duration = asyncio.run(measure(target, dataset, traffic, tokenizer, progress))
    _count_missing(timelines, tokenizer)
    figures = summarize(timelines, duration, percentiles, slos, names)
    print(text_of(figures, percentiles, names))
    result = _settings(parsed, target, dataset, traffic) | metadata | figures
    if parsed.save_detailed:
        result |= _details(timelines)
    if parsed.save_result or parsed.save_detailed:
        print(f"\n{_save(parsed, result)}")
    if parsed.plot and figures["completed"]:
        write_plot(Path(parsed.plot), timelines, f"{target.model}, {dataset.dataset_name}")
        print(parsed.plot)
    errors = [t.error for t in timelines if t.error is not None]
    if errors:
        print(f"jaxinfer: error: {len(errors)} requests failed: {errors[0]}", file=sys.stderr)
    return 1 if errors else 0


def wait_until_ready(base_url: str, headers: Mapping[str, str], limit: float) -> dict[str, Any]:
    """The first model that the server lists. Raises `OSError` when it answers with none for `limit` seconds."""
    end = time.monotonic() + limit
    while True:
        try:
            with httpx.Client(headers=dict(headers), trust_env=False) as http:
                response = http.get(f"{base_url}/v1/models", timeout=10)
            if response.status_code in (401, 403):
                raise ValueError(
                    f"{base_url} wants a key: set OPENAI_API_KEY, or --header Authorization=…"
                )
            response.raise_for_status()
            card: dict[str, Any] = response.json()["data"][0]
            return card
        except (httpx.HTTPError, KeyError, IndexError, json.JSONDecodeError) as error:
            if time.monotonic() >= end:
                raise OSError(f"{base_url} doesn't serve a model: {error}") from error
        time.sleep(_POLL_SECONDS)


def _pair(flag: str, text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not (name and equals):
        raise ValueError(f"{flag} must be NAME=VALUE, got {text!r}.")
    return name, value


def _count_missing(timelines: Sequence[Timeline], tokenizer: Tokenizer) -> None:
    """For servers that report no usage: the tokens of the text."""
    for timeline in timelines:
        if timeline.error is None and not timeline.num_output_tokens:
            ids = tokenizer.encode(timeline.text, add_special_tokens=False)
            timeline.num_output_tokens = len(ids)


def _settings(
    parsed: argparse.Namespace, target: Target, dataset: DatasetArgs, traffic: Traffic
) -> dict[str, Any]:
    rate = traffic.request_rate
    return {
        "date": datetime.now().strftime("%Y%m%d-%H%M%S"),
        "backend": parsed.backend,
        "label": parsed.label,
        "model_id": target.model,
        "dataset_name": dataset.dataset_name,
        "num_prompts": dataset.num_prompts,
        "seed": dataset.seed,
        "request_rate": rate if np.isfinite(rate) else "inf",
        "burstiness": traffic.burstiness,
        "max_concurrency": traffic.max_concurrency,
    }


def _details(timelines: Sequence[Timeline]) -> dict[str, Any]:
    """By request, in seconds."""
    first = min(t.start for t in timelines)
    return {
        "input_lens": [t.num_prompt_tokens for t in timelines],
        "output_lens": [t.num_output_tokens for t in timelines],
        "start_times": [t.start - first for t in timelines],
        "ttfts": [t.ttft if t.token_times else None for t in timelines],
        "itls": [t.itls for t in timelines],
        "generated_texts": [t.text for t in timelines],
        "errors": [t.error for t in timelines],
    }


def _save(parsed: argparse.Namespace, result: Mapping[str, Any]) -> Path:
    name = parsed.result_filename
    if name is None:
        at = f"-concurrency{parsed.max_concurrency}" if parsed.max_concurrency else ""
        model = Path(result["model_id"]).name
        name = f"{parsed.label or parsed.backend}-{parsed.request_rate}qps{at}-{model}-{result['date']}.json"
    path = Path(parsed.result_dir or ".") / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result) + "\n", encoding="utf-8")
    return path
