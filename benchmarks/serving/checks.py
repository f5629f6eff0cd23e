"""What a soak test's cases share: their findings, the requests they send, and the server's own view of itself."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass
from typing import Any

from .http_client import (
    COMPLETIONS,
    Address,
    Answer,
    Call,
    http_request,
    open_call,
    read_metrics,
)

FIRST_ID, LAST_ID = 300, 3800
"""Prompts are made of these tokens: of ordinary words in the models used here."""
POLL_SECONDS = 0.02
BLOCK_SIZE = 16
IDLE_LIMIT = 30.0


@dataclass(frozen=True)
class Check:
    case: str
    what: str
    found: str
    wanted: str
    ok: bool


def at_most(case: str, what: str, found: float, limit: float, unit: str = "") -> Check:
    return Check(case, what, f"{found:.4g}{unit}", f"at most {limit:.4g}{unit}", found <= limit)


def equal(case: str, what: str, found: object, wanted: object) -> Check:
    return Check(case, what, str(found), str(wanted), found == wanted)


def percentile(values: Iterable[float], q: float) -> float:
    """The smallest value that at least the share `q` of them don't exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(q * len(ordered)))]


def random_prompt(rng: random.Random, length: int) -> list[int]:
    return [rng.randint(FIRST_ID, LAST_ID) for _ in range(length)]


def completion(prompt: list[int], max_tokens: int, **fields: Any) -> dict[str, Any]:
    """A stream of exactly `max_tokens` tokens."""
    return {
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        **fields,
    }


def faults(answer: Answer, body: dict[str, Any]) -> list[str]:
    """What is wrong with a stream that should be whole: none in `body` was to fail."""
    if answer.status != 200:
        return [f"status {answer.status}: {answer.body[:200]!r}"]
    *events, last = answer.events() or [{}]
    found = [] if last is None and None not in events else ["not exactly one [DONE], at the end"]
    choices: dict[int, list[Any]] = {}
    usage = None
    for event in events:
        if event is None or "error" in event:
            found.append(f"an error event: {event}")
            continue
        usage = event.get("usage") or usage
        for choice in event["choices"]:
            choices.setdefault(choice["index"], []).append(choice)
    n = body.get("n", 1)
    if sorted(choices) != list(range(n)):
        found.append(f"choices {sorted(choices)} of {n}")
    for index, pieces in choices.items():
        reasons = [piece["finish_reason"] for piece in pieces]
        if reasons[-1] != "length" or any(reasons[:-1]):
            found.append(f"finish reasons of choice {index}: {[r for r in reasons if r]}")
        if not "".join(piece["text"] for piece in pieces):
            found.append(f"choice {index} has no text")
    wanted = n * body["max_tokens"]
    if usage is None or usage["completion_tokens"] != wanted:
        found.append(f"usage {usage}, not {wanted} tokens")
    return found


async def until_idle(address: Address) -> tuple[dict[str, float], float]:
    """The metrics once nothing runs or waits, and the seconds that it took; the last ones seen after `IDLE_LIMIT`."""
    start = time.perf_counter()
    while True:
        values = await read_metrics(address)
        seconds = time.perf_counter() - start
        if _is_idle(values) or seconds > IDLE_LIMIT:
            return values, seconds
        await asyncio.sleep(POLL_SECONDS)


async def leftover_blocks(address: Address, num_blocks: int, max_len: int) -> float:
    """Blocks that are taken on an idle server, seen beside one stream that has just begun: 0 when all are free."""
    name = "generation_tokens_total"
    before = (await read_metrics(address))[name]
    request = http_request(
        address, COMPLETIONS, completion(list(range(FIRST_ID, FIRST_ID + 16)), max_len - 32)
    )
    call = await open_call(address, request)
    async with asyncio.timeout(60):
        while (values := await read_metrics(address))[name] == before:
            pass
    call.hang_up(reset=False)
    own = (16 + values[name] - before) / BLOCK_SIZE + 2
    await until_idle(address)
    return max(0.0, values["kv_cache_usage_perc"] * num_blocks - own)


def _is_idle(values: dict[str, float]) -> bool:
    return values["num_requests_running"] == values["num_requests_waiting"] == 0


class Witness:
    """A stream that always runs, so that the engine goes on to step and to report: of what isn't the witness's own, its
    numbers are then true."""

    def __init__(self, address: Address, num_blocks: int, length: int) -> None:
        self._address = address
        self._num_blocks = num_blocks
        self._own_blocks = -(-length // BLOCK_SIZE) + 1
        self._body = completion(list(range(FIRST_ID, FIRST_ID + 16)), length - 16)
        self._call: Call | None = None

    @classmethod
    @contextlib.asynccontextmanager
    async def watching(
        cls, address: Address, num_blocks: int, length: int
    ) -> AsyncIterator[Witness]:
        witness = cls(address, num_blocks, length)
        task = asyncio.create_task(witness._run())
        try:
            yield witness
        finally:
            task.cancel()
            if witness._call is not None:
                witness._call.hang_up(reset=False)

    async def _run(self) -> None:
        while True:
            request = http_request(self._address, COMPLETIONS, self._body)
            self._call = await open_call(self._address, request)
            await self._call.ended.wait()

    async def until_alone(self) -> float:
        """Seconds until nothing but the witness runs or waits, or has blocks; at most `IDLE_LIMIT`."""
        start = time.perf_counter()
        while True:
            values = await read_metrics(self._address)
            seconds = time.perf_counter() - start
            others = values["kv_cache_usage_perc"] * self._num_blocks - self._own_blocks
            is_alone = (
                values["num_requests_running"] <= 1
                and values["num_requests_waiting"] == 0
                and others <= 0
            )
            if is_alone or seconds > IDLE_LIMIT:
                return seconds
            await asyncio.sleep(POLL_SECONDS)
