"""Counts that one step leaves behind for metrics and logs."""

from __future__ import annotations

import msgspec


class SchedulerStats(msgspec.Struct, array_like=True):
    """The scheduler after a step: `kv_cache_usage` is the used share of the block pool, in [0, 1];
    `num_scheduled_tokens` are the step's, `num_preemptions` those since the step before it.

    Since then, too: `prefix_cache_queries` tokens of requests that were admitted for the first time and may read the
    prefix cache, `prefix_cache_hits` of which were found there. `num_compilations` are the executor's since it was
    ready."""

    num_running: int = 0
    num_waiting: int = 0
    kv_cache_usage: float = 0.0
    num_scheduled_tokens: int = 0
    num_preemptions: int = 0
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    num_compilations: int = 0
