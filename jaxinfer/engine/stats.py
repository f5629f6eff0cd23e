"""Counts that one step leaves behind for metrics and logs."""

from __future__ import annotations

import msgspec


class StepWork(msgspec.Struct, array_like=True, gc=False):
    """Estimates for one device: floating-point operations, bytes read and written, and the seconds that they take at
    the device's peaks (0 where those aren't known)."""

    flops: float = 0.0
    read_bytes: float = 0.0
    write_bytes: float = 0.0
    roofline_seconds: float = 0.0


class HostSeconds(msgspec.Struct, array_like=True, gc=False):
    """Where the engine core's thread was: planning, giving work to the device, waiting for its results, and bringing
    the requests up to date with them."""

    schedule: float = 0.0
    launch: float = 0.0
    wait: float = 0.0
    update: float = 0.0


class DeviceMemory(msgspec.Struct, array_like=True, gc=False):
    """Of the first device: bytes in use, and how many of them there may be. On a CPU, the process's and the machine's."""

    used_bytes: int
    limit_bytes: int


class SpecDecodeStats(msgspec.Struct, array_like=True):
    """What a step verified: `num_drafts` requests' guesses, `num_draft_tokens` in all, of which `num_accepted_tokens`
    were right; `num_accepted_tokens_per_pos[i]` of them were a request's guess number i."""

    num_drafts: int
    num_draft_tokens: int
    num_accepted_tokens: int
    num_accepted_tokens_per_pos: list[int]


class SchedulerStats(msgspec.Struct, array_like=True):
    """The scheduler after a step: `num_deferred` of the `num_waiting` requests couldn't be admitted now whatever there is
    room for, as their grammars are being compiled; `kv_cache_usage` is the used share of the block pool, in [0, 1];
    `num_scheduled_tokens` are the step's, `num_preemptions` those since the step before it.

    Since then, too: `prefix_cache_queries` tokens of requests that were admitted for the first time and may read the
    prefix cache, `prefix_cache_hits` of which were found there, and the core's `seconds`. `num_compilations` are the
    executor's since it was ready; `memory` is there now and then. `spec_decode` is the step's, None where it verified
    nothing. `running_adapters` and `waiting_adapters` are the names of those that requests run and wait with."""

    num_running: int = 0
    num_waiting: int = 0
    kv_cache_usage: float = 0.0
    num_scheduled_tokens: int = 0
    num_preemptions: int = 0
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    num_compilations: int = 0
    work: StepWork | None = None
    seconds: HostSeconds | None = None
    memory: DeviceMemory | None = None
    spec_decode: SpecDecodeStats | None = None
    num_deferred: int = 0
    running_adapters: list[str] = []
    waiting_adapters: list[str] = []
