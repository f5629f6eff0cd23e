"""Many streams, clients that leave, and clients that don't read."""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from .checks import (
    Check,
    Witness,
    at_most,
    completion,
    equal,
    faults,
    leftover_blocks,
    percentile,
    random_prompt,
    until_idle,
)
from .http_client import (
    COMPLETIONS,
    Address,
    Call,
    ask,
    http_request,
    open_call,
    read_metrics,
)
from .server import Server, resident_bytes

MIB = 2**20
SETTLED_AFTER = 500
"""Requests after which memory has to be flat."""
FLAT_MIB = 8.0
NUM_SLOW, NUM_READERS, READER_TOKENS = 8, 30, 128
STUCK_TOKENS = 200
"""Of each answer that nobody reads, until the buffers between are full."""


@dataclass
class Memory:
    """Resident bytes of some processes over the number of requests that are done."""

    pids: dict[str, int]
    done: list[int] = field(default_factory=list)
    sizes: dict[str, list[int]] = field(default_factory=dict)

    def sample(self, done: int) -> None:
        self.done.append(done)
        for name, pid in self.pids.items():
            self.sizes.setdefault(name, []).append(resident_bytes(pid))

    def growth(self, name: str) -> tuple[float, float]:
        """MiB per 1,000 requests after the settling, of a line through the samples, and the highest MiB."""
        done, sizes = np.array(self.done), np.array(self.sizes[name]) / MIB
        after = done >= SETTLED_AFTER
        slope = np.polyfit(done[after], sizes[after], 1)[0] * 1000 if after.sum() > 2 else 0.0
        return float(slope), float(sizes.max())


async def streams(
    server: Server,
    num_clients: int,
    num_requests: int,
    num_blocks: int,
    max_len: int,
    rng: random.Random,
) -> list[Check]:
    """`num_clients` at once, `num_requests` in all, of many lengths; some for several choices, some with long prompts."""
    memory = Memory({"API server": server.process.pid, "engine core": server.core_pid})
    bodies = []
    for i in range(num_requests):
        body = completion(
            random_prompt(rng, 1000 if i % 16 == 5 else rng.randint(4, 200)), rng.randint(4, 48)
        )
        bodies.append(body | ({"n": 3, "temperature": 1, "seed": i} if i % 8 == 3 else {}))
    queue = iter(bodies)
    found: list[str] = []
    done = 0

    async def client() -> None:
        nonlocal done
        for body in queue:
            call = await ask(server.address, COMPLETIONS, body)
            found.extend(faults(call.answer, body))
            done += 1

    async def watch() -> None:
        while True:
            memory.sample(done)
            await asyncio.sleep(0.2)

    before = await read_metrics(server.address)
    start = time.perf_counter()
    watching = asyncio.create_task(watch())
    await asyncio.gather(*(client() for _ in range(num_clients)))
    seconds = time.perf_counter() - start
    watching.cancel()
    after, _ = await until_idle(server.address)
    blocks = await leftover_blocks(server.address, num_blocks, max_len)
    for text in found[:5]:
        print(f"streams: {text}")
    choices = sum(body.get("n", 1) for body in bodies)
    tokens = sum(body.get("n", 1) * body["max_tokens"] for body in bodies)
    ended = {
        name: after[f"request_success_total.{name}"] - before[f"request_success_total.{name}"]
        for name in ("length", "stop", "abort", "error")
    }
    checks = [
        equal(
            "streams",
            f"whole answers ({tokens / seconds:.0f} tokens/s)",
            done - len(found),
            num_requests,
        ),
        equal(
            "streams",
            "choices by their end",
            ended,
            {"length": choices, "stop": 0, "abort": 0, "error": 0},
        ),
        equal("streams", "running and waiting afterwards", _load(after), (0, 0)),
        equal("streams", "blocks that stay taken", blocks, 0.0),
    ]
    for name in memory.pids:
        slope, most = memory.growth(name)
        what = f"MiB that the {name} grows per 1,000 requests (at most {most:.0f} MiB in all)"
        checks.append(at_most("streams", what, slope, FLAT_MIB))
    return checks


def _load(values: dict[str, float]) -> tuple[int, int]:
    return int(values["num_requests_running"]), int(values["num_requests_waiting"])


async def disconnects(
    server: Server, num_clients: int, num_blocks: int, max_len: int, rng: random.Random
) -> list[Check]:
    """In waves of 50: whoever leaves is forgotten within a second, whatever the request was at, and how it left."""
    before = await read_metrics(server.address)
    seconds = []
    async with Witness.watching(server.address, num_blocks, max_len) as witness:
        await witness.until_alone()
        for start in range(0, num_clients, 50):
            size = min(50, num_clients - start)
            await asyncio.gather(*(_leaver(server.address, max_len, rng) for _ in range(size)))
            seconds.append(await witness.until_alone())
    after, _ = await until_idle(server.address)
    lone = completion(random_prompt(rng, 20), 20)
    answered = faults((await ask(server.address, COMPLETIONS, lone)).answer, lone)
    blocks = await leftover_blocks(server.address, num_blocks, max_len)
    aborted = after["request_success_total.abort"] - before["request_success_total.abort"]
    what = f"seconds until the last of a wave is forgotten ({aborted:.0f} of {num_clients} requests aborted)"
    return [
        at_most("disconnects", what, max(seconds), 1.0),
        equal("disconnects", "blocks that stay taken", blocks, 0.0),
        equal("disconnects", "running and waiting afterwards", _load(after), (0, 0)),
        equal(
            "disconnects",
            "errors of the engine",
            after["request_success_total.error"],
            before["request_success_total.error"],
        ),
        equal("disconnects", "faults of an answer afterwards", answered, []),
    ]


async def _leaver(address: Address, max_len: int, rng: random.Random) -> None:
    await asyncio.sleep(rng.uniform(0, 0.2))
    moment = rng.choice(
        ("half a body", "before the answer", "in the prefill", "mid-stream", "unstreamed")
    )
    length = max_len // 2 if moment == "in the prefill" else rng.randint(4, 60)
    fields = {"stream": False, "stream_options": None} if moment == "unstreamed" else {}
    body = completion(random_prompt(rng, length), max_len // 2 - 1, **fields)
    request = http_request(address, COMPLETIONS, body)
    if moment == "half a body":
        request = request[: len(request) - rng.randint(1, 20)]
    stop_after = rng.randint(2, 30)
    enough = asyncio.Event()

    def on_data(_: Call, count: int) -> None:
        if count >= stop_after:
            enough.set()

    call = await open_call(address, request, on_data)
    if moment == "mid-stream":
        async with asyncio.timeout(60):
            await enough.wait()
    else:
        await asyncio.sleep(rng.uniform(0, 0.1))
    call.hang_up(reset=rng.random() < 0.5)


async def slow_readers(
    server: Server, rounds: int, max_len: int, rng: random.Random
) -> list[Check]:
    """p99 between two arrivals at clients that read, beside others that have stopped reading, and beside as many that ask
    for the same and read: the engine's work is the same."""
    ratios: list[float] = []
    p99 = {"stuck": 0.0, "reading": 0.0}
    sizes = []
    await _readers(server.address, rng)
    for turn in range(rounds):
        found = {}
        for name in ("stuck", "reading") if turn % 2 else ("reading", "stuck"):
            before = (await read_metrics(server.address))["generation_tokens_total"]
            others = [
                await _long_stream(server.address, max_len, rng, name == "stuck")
                for _ in range(NUM_SLOW)
            ]
            enough = before + NUM_SLOW * STUCK_TOKENS
            while (await read_metrics(server.address))["generation_tokens_total"] < enough:
                await asyncio.sleep(0.1)
            found[name] = percentile(await _readers(server.address, rng), 0.99)
            sizes.append(resident_bytes(server.process.pid) / MIB)
            for call in others:
                call.hang_up(reset=True)
            await until_idle(server.address)
        ratios.append(found["stuck"] / found["reading"])
        p99 = {name: max(p99[name], value) for name, value in found.items()}
    what = f"p99 of {NUM_READERS} readers' ITL beside {NUM_SLOW} that don't read, times that beside as many that do"
    highest = f" (highest {1e3 * p99['stuck']:.1f} and {1e3 * p99['reading']:.1f} ms)"
    return [
        at_most("slow readers", what + highest, statistics.median(ratios), 1.5),
        at_most(
            "slow readers", "MiB that the API server grows", max(sizes) - sizes[0], 4 * FLAT_MIB
        ),
    ]


async def _readers(address: Address, rng: random.Random) -> list[float]:
    bodies = [completion(random_prompt(rng, 16), READER_TOKENS) for _ in range(NUM_READERS)]
    calls = await asyncio.gather(*(ask(address, COMPLETIONS, body) for body in bodies))
    for call, body in zip(calls, bodies, strict=True):
        assert not faults(call.answer, body), faults(call.answer, body)
    return [later - earlier for call in calls for earlier, later in pairwise(call.times)]


async def _long_stream(address: Address, max_len: int, rng: random.Random, stuck: bool) -> Call:
    """That has begun. `stuck`: nobody reads it, and its every event repeats an id of 64 KiB, so that the kernel's buffers
    are full after some tens of them."""
    fields = {"request_id": "x" * 2**16} if stuck else {}
    body = completion(random_prompt(rng, 16), max_len - 32, **fields)
    begun = asyncio.Event()

    def on_data(call: Call, count: int) -> None:
        if stuck:
            call.transport.pause_reading()
        begun.set()

    call = await open_call(
        address, http_request(address, COMPLETIONS, body), on_data, small_buffer=stuck
    )
    async with asyncio.timeout(60):
        await begun.wait()
    return call
