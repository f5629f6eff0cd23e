"""Which blocks of the KV cache are there for requests that wait."""

from __future__ import annotations

import numpy as np

from jaxinfer.engine.cache_demand import CacheDemand
from jaxinfer.engine.kv_cache_manager import CachedPrefix, KVCacheManager
from jaxinfer.engine.plan import Int32


class AdmissionRoom:
    """For one step: the free blocks, less what running requests still need for the tokens that they have.

    What chunks take beyond windows is counted once for all requests, as they share the tokens of a step.
    """

    def __init__(
        self, kv: KVCacheManager, demand: CacheDemand, rows: Int32, num_tokens: Int32
    ) -> None:
        """`rows` [R] run, with `num_tokens` [R] tokens in all."""
        self._kv = kv
        self._demand = demand
        missing = np.maximum(kv.missing(rows, num_tokens), 0)
        self._free = kv.pool.num_free
        self._for_chunks = [0] * kv.num_groups
        """Columns beyond windows that are to be computed yet."""
        for group, limit in enumerate(demand.limits):
            if limit is None:
                self._free -= int(missing.sum())
                continue
            held = kv.num_blocks[rows] - kv.first_columns(group, rows)
            more = np.clip(limit - held, 0, missing)
            self._free -= int(more.sum())
            self._for_chunks[group] = int((missing - more).sum())

    def take(self, cached: CachedPrefix, num_tokens: int) -> bool:
        """Whether a request of `num_tokens` known tokens, the first of which are `cached`, still fits; then it counts."""
        kv = self._kv
        columns = -(-num_tokens // kv.block_size)
        free, for_chunks = self._free, list(self._for_chunks)
        for group, limit in enumerate(self._demand.limits):
            found = cached.blocks[group]
            needed = columns - (cached.num_blocks - len(found))
            if limit is not None and needed > limit:
                for_chunks[group] += needed - limit
                needed = limit
            free -= needed - kv.pool.num_held(found)
        step = self._demand.step_columns
        if free < sum(min(step, number) for number in for_chunks):
            return False
        self._free, self._for_chunks = free, for_chunks
        return True
