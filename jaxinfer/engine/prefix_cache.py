"""Blocks that hold what a request would compute: found when it is admitted, registered as soon as a step is planned
that fills them."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from jaxinfer.config import CacheConfig
from jaxinfer.engine.block_hash import BlockHasher, BlockKey, Extra, KeyTag, group_key
from jaxinfer.engine.kv_cache_manager import CachedPrefix, KVCacheManager
from jaxinfer.engine.longest_prefix import longest_prefix
from jaxinfer.engine.plan import Int32
from jaxinfer.engine.request import Request
from jaxinfer.engine.row_table import RowTable

_OUTPUTS_PER_TURN = 32
"""How many running requests may register generated blocks at once: it bounds what caching costs a step of very many
decodes, at a few microseconds each."""
_NEVER = np.iinfo(np.int32).max


class PrefixCache:
    """Only full blocks are cached, and only such whose tokens the host knows. A plan's blocks count as filled once
    it is made: the device runs the plans in order, and within a step it writes before it reads.

    `num_queries` and `num_hits` count tokens: those of requests that looked, at their first admission, and how many
    of them were found.
    """

    def __init__(self, config: CacheConfig, kv: KVCacheManager, table: RowTable) -> None:
        self.num_queries = 0
        self.num_hits = 0
        self._enabled = config.enable_prefix_caching
        self._hasher = BlockHasher(config.prefix_caching_hash_algo, config.block_size)
        self._kv = kv
        self._table = table
        self._num_registered = np.zeros(len(kv.num_blocks), np.int32)
        self._num_steps = 0
        self._nothing = CachedPrefix(0, [[] for _ in kv.windows])

    def find(self, request: Request) -> CachedPrefix:
        """The blocks of the longest cached prefix of a request that doesn't run. They are not taken yet. A prefix is cached
        where all of it is for layers that look back at all tokens, and the last window of it for others.

        The last known token is never part of it: the token after it is still to be computed from it.
        """
        if not self._enabled:
            return self._nothing
        keys, block_size = request.block_keys, self._kv.block_size
        if len(keys) < request.num_known_tokens // block_size:
            known = request.known_token_ids[len(keys) * block_size :]
            self._hasher.extend(keys, known, _extras(request))
        if not request.reads_prefix_cache:
            return self._nothing
        return longest_prefix(self._kv, keys[: self._num_readable(request)])

    def waits_for(self, request: Request, num_found: int, coming: set[BlockKey]) -> bool:
        """Whether the block after the `num_found` ones that `find` found is among those that are coming."""
        if not coming or not request.reads_prefix_cache:
            return False
        return num_found < self._num_readable(request) and request.block_keys[num_found] in coming

    def coming(self, request: Request) -> list[BlockKey]:
        """Keys of the blocks that a running request has yet to compute from tokens it had when it was admitted."""
        return request.block_keys[int(self._num_registered[request.row]) :]

    def admit(self, request: Request, num_found: int, num_computed: int) -> None:
        """The request has its row and blocks, the first `num_found` of them from here, and the step that is being
        planned brings it to `num_computed` tokens."""
        if not self._enabled:
            return
        self._num_registered[request.row] = num_found
        self._register_row(request.row, num_computed // self._kv.block_size)
        if request.reads_prefix_cache and not request.num_preemptions:
            self.num_queries += request.num_known_tokens
            self.num_hits += num_found * self._kv.block_size

    def register(self, rows: Int32, num_computed: Int32, counts: Int32 | None) -> None:
        """Let the blocks be found that `rows` [R] fill in a step that computes `counts` [R] tokens after the first
        `num_computed` [R].

        Those of prompts at once, unless `counts` is None: nobody needs them in this step. Blocks of outputs are worth finding above all when the request has ended, which is
        when `release` registers them; as long as it runs, they have their turn every `block_size` steps.
        """
        if not self._enabled:
            return
        if counts is not None:
            in_prompt = num_computed < self._table.num_prompt[rows]
            chunks = np.flatnonzero(in_prompt | (counts > 1))
            self._register(rows[chunks], num_computed[chunks] + counts[chunks])
        self._num_steps += 1
        if self._num_steps % self._kv.block_size == 0:
            self._register(rows, num_computed, _OUTPUTS_PER_TURN)

    def register_fallen(self, rows: Int32, num_computed: Int32) -> None:
        """`rows` [R], of which `num_computed` [R] tokens are computed, are about to lose the blocks that fell out of a
        window."""
        if self._enabled:
            self._register(rows, num_computed)

    def release(self, requests: Collection[Request]) -> None:
        """The requests are about to lose their blocks: register the rest of what they have filled."""
        if not self._enabled:
            return
        rows = np.array([request.row for request in requests], np.int32)
        self._register(rows, self._table.num_computed[rows])

    def reset(self) -> None:
        """Nothing that has been computed or planned so far is found any more."""
        self._kv.pool.forget()
        for row, request in enumerate(self._table.requests):
            if request is not None:
                self._num_registered[row] = _NEVER

    def _num_readable(self, request: Request) -> int:
        return (request.num_known_tokens - 1) // self._kv.block_size

    def _register(self, rows: Int32, num_computed: Int32, limit: int | None = None) -> None:
        """Blocks that are full of known, computed tokens, of at most `limit` rows."""
        table = self._table
        known = table.num_prompt[rows] + table.num_output[rows]
        full = np.minimum(known, num_computed) // self._kv.block_size
        due = np.flatnonzero(full > self._num_registered[rows])[:limit]
        for row, num_full in zip(rows[due].tolist(), full[due].tolist(), strict=True):
            self._register_row(row, num_full)

    def _register_row(self, row: int, num_full: int) -> None:
        first = int(self._num_registered[row])
        request = self._table.requests[row]
        assert request is not None
        keys, block_size = request.block_keys, self._kv.block_size
        if len(keys) < num_full:
            tokens = self._table.token_ids(row, len(keys) * block_size, num_full * block_size)
            self._hasher.extend(keys, tokens, _extras(request))
        for group, table in enumerate(self._kv.block_tables):
            held = max(first, self._kv.first_column(group, row))
            new_keys = [group_key(key, group) for key in keys[held:num_full]]
            self._kv.pool.register(table[row, held:num_full].tolist(), new_keys)
        self._num_registered[row] = num_full


def _extras(request: Request) -> tuple[Extra, ...]:
    extras: list[Extra] = []
    if request.adapter is not None:
        extras.append((KeyTag.ADAPTER.value, request.adapter))
    if request.cache_salt is not None:
        extras.append((KeyTag.SALT.value, request.cache_salt))
    return tuple(extras)
