"""An engine core that is killed, a queue that is full, and requests that run out of time."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import time

from .checks import (
    POLL_SECONDS,
    Check,
    Witness,
    at_most,
    completion,
    equal,
    faults,
    leftover_blocks,
    random_prompt,
    until_idle,
)
from .http_client import (
    COMPLETIONS,
    Address,
    Answer,
    ask,
    http_request,
    open_call,
    read_metrics,
)
from .server import Server

NUM_AT_WORK = 64
RESTART_LIMIT = 120.0


async def killed_core(server: Server, max_len: int, rng: random.Random) -> list[Check]:
    """`kill -9` under load, of a server with `--restart-engine`; every fourth request isn't streamed."""
    old = server.core_pid
    num_begun = 0
    all_begun = asyncio.Event()

    def on_data(_: object, count: int) -> None:
        nonlocal num_begun
        num_begun += count == 2
        if num_begun == NUM_AT_WORK - NUM_AT_WORK // 4:
            all_begun.set()

    calls = []
    for i in range(NUM_AT_WORK):
        fields = {"stream": False, "stream_options": None} if i % 4 == 3 else {}
        body = completion(random_prompt(rng, 16), max_len - 32, **fields)
        calls.append(
            await open_call(
                server.address, http_request(server.address, COMPLETIONS, body), on_data
            )
        )
    async with asyncio.timeout(60):
        await all_begun.wait()
    watching = asyncio.create_task(_watch_health(server.address))
    await asyncio.sleep(5 * POLL_SECONDS)
    os.kill(old, signal.SIGKILL)
    killed = time.perf_counter()
    async with asyncio.timeout(RESTART_LIMIT):
        await asyncio.gather(*(call.ended.wait() for call in calls))
    last = max(call.end for call in calls) - killed
    told = sum(_is_told(call.answer, streamed=i % 4 != 3) for i, call in enumerate(calls))
    statuses = await watching
    body = completion(random_prompt(rng, 16), 16)
    answered = faults((await ask(server.address, COMPLETIONS, body)).answer, body)
    what = f"seconds until the last of {NUM_AT_WORK} requests has failed"
    return [
        at_most("killed core", what, last, 2.0),
        equal("killed core", "of them with an error body, or an error event", told, NUM_AT_WORK),
        equal("killed core", "statuses of /health, in order", statuses, [200, 503, 200]),
        equal("killed core", "another core serves", server.core_pid != old, True),
        equal("killed core", "faults of an answer afterwards", answered, []),
    ]


def _is_told(answer: Answer, streamed: bool) -> bool:
    if not streamed:
        error = json.loads(answer.body)["error"]
        return answer.status == 500 and "engine core has died" in error["message"]
    events = answer.events()
    errors = [event["error"] for event in events if event is not None and "error" in event]
    return len(errors) == 1 and errors[0]["code"] == 500 and events[-1] is None


async def _watch_health(address: Address) -> list[int]:
    """What `/health` says, without repetitions, until it is well again."""
    statuses: list[int] = []
    async with asyncio.timeout(RESTART_LIMIT):
        while statuses[-1:] != [200] or 503 not in statuses:
            status = (await ask(address, "/health", limit=10)).answer.status
            if statuses[-1:] != [status]:
                statuses.append(status)
            await asyncio.sleep(POLL_SECONDS)
    return statuses


async def full_queue(
    server: Server, num_running: int, num_queued: int, max_len: int, rng: random.Random
) -> list[Check]:
    """Of a server with `--max-num-seqs` and `--max-num-queued-reqs`: twice as many requests at once as it takes."""
    room = num_running + num_queued
    bodies = [completion(random_prompt(rng, 16), max_len // 4) for _ in range(2 * room)]
    calls = await asyncio.gather(*(ask(server.address, COMPLETIONS, body) for body in bodies))
    answers = [call.answer for call in calls]
    whole = sum(not faults(answer, body) for answer, body in zip(answers, bodies, strict=True))
    refused = [answer for answer in answers if answer.status == 503]
    polite = sum(
        "retry-after" in answer.headers and b'"error"' in answer.body for answer in refused
    )
    slowest = max(call.end - call.start for call in calls if call.answer.status == 503)
    await until_idle(server.address)
    return [
        equal("full queue", "requests that are answered whole", whole, room),
        equal("full queue", "refused with 503 and Retry-After", polite, room),
        at_most("full queue", "seconds until the last of them knows", slowest, 1.0),
    ]


async def timeouts(
    server: Server, num_blocks: int, max_len: int, rng: random.Random
) -> list[Check]:
    """Requests whose `timeout` is far too short end then, also those whose clients don't read."""
    before = await read_metrics(server.address)
    limit = 0.3
    async with Witness.watching(server.address, num_blocks, max_len) as witness:
        await witness.until_alone()
        calls, stuck = [], []
        for i in range(16):
            fields = {"stream": False, "stream_options": None} if i % 2 else {}
            body = completion(random_prompt(rng, 16), max_len - 32, timeout=limit, **fields)
            calls.append(ask(server.address, COMPLETIONS, body))
        for _ in range(4):
            body = completion(
                random_prompt(rng, 16), max_len - 32, timeout=limit, request_id="x" * 4096
            )
            request = http_request(server.address, COMPLETIONS, body)
            call = await open_call(
                server.address,
                request,
                lambda call, _: call.transport.pause_reading(),
                small_buffer=True,
            )
            stuck.append(call)
        done = await asyncio.gather(*calls)
        took = await witness.until_alone()
        for call in stuck:
            call.hang_up(reset=True)
    after, _ = await until_idle(server.address)
    blocks = await leftover_blocks(server.address, num_blocks, max_len)
    told = sum(_is_timed_out(call.answer, streamed=i % 2 == 0) for i, call in enumerate(done))
    slowest = max(call.end - call.start for call in done)
    aborted = after["request_success_total.abort"] - before["request_success_total.abort"]
    return [
        equal("timeouts", "of 16 requests, ended with a 504 or its event", told, 16),
        at_most(
            "timeouts",
            f"seconds that the slowest of them took, of a timeout of {limit}",
            slowest,
            2.0,
        ),
        at_most("timeouts", "seconds until they, and 4 that don't read, are forgotten", took, 1.0),
        equal("timeouts", "blocks that stay taken", blocks, 0.0),
        equal("timeouts", "aborted requests, the witness among them", aborted, 21),
    ]


def _is_timed_out(answer: Answer, streamed: bool) -> bool:
    if not streamed:
        return answer.status == 504 and json.loads(answer.body)["error"]["type"] == "timeout_error"
    events = answer.events()
    errors = [event["error"] for event in events if event is not None and "error" in event]
    return [error["code"] for error in errors] == [504]
