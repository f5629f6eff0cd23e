"""A picture of the engine between two steps: its requests, its blocks, and what the last steps held. Bounded in size,
whatever there is of them, and without a token of anybody's text."""

from __future__ import annotations

import time
from collections.abc import Collection
from itertools import islice

import msgspec
import numpy as np
import numpy.typing as npt

from jaxinfer.engine.block_pool import BlockPool, BlockState
from jaxinfer.engine.plan import Int32
from jaxinfer.engine.request import NO_ROW, Request
from jaxinfer.engine.row_table import RowTable
from jaxinfer.engine.scheduled_step import ScheduledStep
from jaxinfer.engine.scheduler import Scheduler
from jaxinfer.engine.step_log import StepLog, StepParts

MAX_REQUESTS = 64
"""Shown of those that run, of those that wait, and of a step's rows."""
MAX_CELLS = 1024
MAX_STEPS = 96


class RequestPicture(msgspec.Struct):
    """`num_cached_tokens` were found in the prefix cache when it was last admitted. `num_computed_tokens` are in the KV
    cache, or will be after the steps in flight; like `num_blocks`, 0 unless it runs."""

    id: str
    state: str
    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int
    num_computed_tokens: int
    num_blocks: int
    num_preemptions: int
    priority: int
    age_seconds: float


class Requests(msgspec.Struct):
    """How many there are, and the first `MAX_REQUESTS` of each kind: running ones in the order of admission, others in
    that of arrival."""

    num_running: int
    num_waiting: int
    running: list[RequestPicture]
    waiting: list[RequestPicture]


class BlockCells(msgspec.Struct):
    """Blocks 1, 2 … of the pool in their order, `blocks_per_cell` of them in each cell (in the last one, what is left):
    how many are in which state."""

    blocks_per_cell: int
    free: list[int]
    cached: list[int]
    in_use: list[int]
    shared: list[int]


class Blocks(msgspec.Struct):
    """Each of the `num_blocks` (without the padding block) is `free` with nothing of use in it, `cached` (free as well,
    and can be found until it is handed out anew), held by one request (`in_use`) or by several (`shared`)."""

    num_blocks: int
    free: int
    cached: int
    in_use: int
    shared: int
    cells: BlockCells


class StepRow(msgspec.Struct):
    """`kind`: "prefill" or "decode"."""

    id: str
    kind: str
    num_tokens: int
    num_draft_tokens: int


class StepPicture(msgspec.Struct):
    """`requests`: the `MAX_REQUESTS` that compute most tokens."""

    num_requests: int
    num_prefill_tokens: int
    num_decode_tokens: int
    num_draft_tokens: int
    requests: list[StepRow]


class RecentSteps(msgspec.Struct):
    """The last `MAX_STEPS` at most, oldest first, by column. Guesses that were right are `accepted`, and count among
    the `generated` tokens."""

    seconds_ago: list[float]
    prefill: list[int]
    decode: list[int]
    draft: list[int]
    accepted: list[int]
    generated: list[int]


class Rates(msgspec.Struct):
    """Tokens per second, over the last `seconds`."""

    seconds: float
    prefill: float
    generated: float


class Anatomy(msgspec.Struct):
    """`timestamp`: `time.monotonic` seconds of the core. `took_seconds`: to make this. `last_step` is None before the
    first; of the others, and of `rates`, only is known what was while somebody looked on."""

    timestamp: float
    took_seconds: float
    is_sleeping: bool
    requests: Requests
    blocks: Blocks
    last_step: StepPicture | None
    recent_steps: RecentSteps
    rates: Rates | None


def take_anatomy(scheduler: Scheduler, log: StepLog, is_sleeping: bool) -> Anatomy:
    """As things stand now; steps are written down from here on, for the next ones to ask."""
    start = time.perf_counter()
    now = time.monotonic()
    log.watch(now)
    rates = log.rates(now)
    anatomy = Anatomy(
        timestamp=now,
        took_seconds=0.0,
        is_sleeping=is_sleeping,
        requests=_requests(scheduler, now),
        blocks=_blocks(scheduler.kv.pool),
        last_step=None if log.last is None else _step(log.last, scheduler.table),
        recent_steps=_recent(log, now),
        rates=None if rates is None else Rates(*rates),
    )
    anatomy.took_seconds = time.perf_counter() - start
    return anatomy


def _requests(scheduler: Scheduler, now: float) -> Requests:
    def picture(request: Request) -> RequestPicture:
        row, table, kv = request.row, scheduler.table, scheduler.kv
        runs = row != NO_ROW
        num_columns = int(kv.num_blocks[row]) if runs else 0
        return RequestPicture(
            id=request.request_id,
            state=request.state.name.lower(),
            num_prompt_tokens=len(request.prompt_token_ids),
            num_output_tokens=int(table.num_output[row]) if runs else len(request.output_token_ids),
            num_cached_tokens=request.num_cached_tokens,
            num_computed_tokens=int(table.num_computed[row]) if runs else 0,
            num_blocks=int(np.count_nonzero(kv.block_tables[:, row, :num_columns])),
            num_preemptions=request.num_preemptions,
            priority=request.priority,
            age_seconds=max(now - request.arrival_time, 0.0),
        )

    def first(requests: Collection[Request], runs: bool) -> list[RequestPicture]:
        chosen = (request for request in requests if (request.row != NO_ROW) == runs)
        return [picture(request) for request in islice(chosen, MAX_REQUESTS)]

    num_running = len(scheduler.running)
    return Requests(
        num_running=num_running,
        num_waiting=len(scheduler.requests) - num_running,
        running=first(scheduler.running, True),
        waiting=first(scheduler.requests.values(), False),
    )


def _blocks(pool: BlockPool) -> Blocks:
    states = pool.states()
    free, cached, in_use, shared = np.bincount(states, minlength=len(BlockState)).tolist()
    per_cell = -(-len(states) // MAX_CELLS)
    padding = np.full(-len(states) % per_cell, len(BlockState), np.uint8)
    by_cell = np.concatenate([states, padding]).reshape(-1, per_cell)

    def cells(state: BlockState) -> list[int]:
        found: list[int] = np.count_nonzero(by_cell == state, axis=1).tolist()
        return found

    in_cells = BlockCells(per_cell, *map(cells, BlockState))
    return Blocks(len(states), free, cached, in_use, shared, in_cells)


def _step(step: ScheduledStep, table: RowTable) -> StepPicture:
    parts = StepParts.of(step, table)
    total: Int32 = parts.num_known + parts.num_drafts
    longest = np.argsort(-total, kind="stable")[:MAX_REQUESTS]
    rows = [
        StepRow(step.batch.request_ids[i], "prefill" if is_prefill else "decode", known, drafts)
        for i, is_prefill, known, drafts in zip(
            longest.tolist(),
            parts.is_prefill[longest].tolist(),
            parts.num_known[longest].tolist(),
            parts.num_drafts[longest].tolist(),
            strict=True,
        )
    ]
    return StepPicture(len(total), *parts.totals, rows)


def _recent(log: StepLog, now: float) -> RecentSteps:
    steps = log.latest(MAX_STEPS)
    ago = np.maximum(now - steps.pop("time"), 0.0)
    columns: dict[str, npt.NDArray[np.int64]] = {k: v.astype(np.int64) for k, v in steps.items()}
    return RecentSteps(
        np.round(ago, 4).tolist(), **{name: column.tolist() for name, column in columns.items()}
    )
