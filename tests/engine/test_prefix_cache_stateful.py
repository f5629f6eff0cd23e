"""The prefix cache, with windows and without, against a model that keeps whole sequences instead of hashes, and a list as
the free queue."""

from __future__ import annotations

import os

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from jaxinfer.config import CacheConfig, ModelConfig
from jaxinfer.engine.kv_cache_manager import KVCacheManager
from jaxinfer.engine.plan import Int32
from jaxinfer.engine.prefix_cache import PrefixCache
from jaxinfer.engine.request import Request
from jaxinfer.engine.row_table import RowTable
from tests.engine.fake_requests import VOCAB, make_request

BLOCK, NUM_COLUMNS, NUM_ROWS, MAX_LEN = 4, 13, 4, 40
MODEL = ModelConfig("fake", "fake", "float32", MAX_LEN, VOCAB)
WINDOWS = [(None,), (None,), (None, 5), (None, 9, 1), (6,), (3, 10)]
"""Of groups of layers."""

type Content = tuple[int, str | None, tuple[int, ...]]
"""Of a block: the group, and what its tokens' keys and values depend on."""


class CacheOfSequences(RuleBasedStateMachine):
    @initialize(windows=st.sampled_from(WINDOWS))
    def start(self, windows: tuple[int | None, ...]) -> None:
        self.windows = windows
        self.num_blocks = 1 + NUM_COLUMNS * len(windows)
        self.table = RowTable(NUM_ROWS, VOCAB)
        self.kv = KVCacheManager(self.num_blocks, BLOCK, NUM_ROWS, MAX_LEN // BLOCK, windows)
        self.cache = PrefixCache(CacheConfig(BLOCK, windows=windows), self.kv, self.table)
        self.queue = list(range(1, self.num_blocks))
        self.where: dict[Content, int] = {}
        self.running: dict[Request, list[list[int]]] = {}
        """By column the blocks of all groups, 0 where the request holds none."""
        self.tokens: dict[Request, list[int]] = {}
        self.num_filled: dict[Request, int] = {}
        self.from_before_reset: set[Request] = set()
        self.count = 0
        self.num_steps = 0

    def take(self, num_columns: int) -> list[list[int]]:
        """Group by group."""
        count = num_columns * len(self.windows)
        blocks, self.queue = self.queue[:count], self.queue[count:]
        self.where = {c: b for c, b in self.where.items() if b not in blocks}
        return [blocks[i::num_columns] for i in range(num_columns)]

    def sees(self, group: int, position: int, column: int) -> bool:
        """Whether the token at `position` looks back at one in the column, in the group's layers."""
        window = self.windows[group]
        places = range(column * BLOCK, min((column + 1) * BLOCK, position + 1))
        return any(window is None or position - place < window for place in places)

    def fill(self, request: Request, num_tokens: int) -> None:
        """The first `num_tokens` tokens are known and computed."""
        if request in self.from_before_reset:
            return
        for i in range(self.num_filled[request], num_tokens // BLOCK):
            tokens = tuple(self.tokens[request][: (i + 1) * BLOCK])
            for group, block in enumerate(self.running[request][i]):
                if block:
                    self.where.setdefault((group, request.cache_salt, tokens), block)
            self.num_filled[request] = i + 1

    def longest_prefix(self, tokens: list[int], salt: str | None) -> tuple[int, list[list[int]]]:
        for n in range((len(tokens) - 1) // BLOCK, 0, -1):
            blocks = [
                [
                    self.where.get((group, salt, tuple(tokens[: (i + 1) * BLOCK])), 0)
                    for i in range(n)
                    if self.sees(group, n * BLOCK, i)
                ]
                for group in range(len(self.windows))
            ]
            if all(map(all, blocks)):
                return n, blocks
        return 0, [[] for _ in self.windows]

    @precondition(lambda self: len(self.running) < NUM_ROWS)
    @rule(
        base=st.sampled_from([0, 0, 25]),
        num_common=st.integers(0, 20),
        own=st.lists(st.integers(0, 3), max_size=9),
        salt=st.sampled_from([None, None, "x", "y"]),
        skips=st.sampled_from([False, False, False, True]),
        chunk=st.integers(1, 30),
    )
    def admit(
        self, base: int, num_common: int, own: list[int], salt: str | None, skips: bool, chunk: int
    ) -> None:
        tokens = [*range(base, base + num_common), *own] or [1]
        self.count += 1
        message = make_request(
            str(self.count), tokens, salt=salt, max_tokens=None, skip_reading_prefix_cache=skips
        )
        request = Request(message, MODEL, self.count)
        num_found, blocks = self.longest_prefix([1] if skips else tokens, salt)
        found = self.cache.find(request)
        assert found == (num_found, blocks)
        end = min(len(tokens), num_found * BLOCK + chunk)
        num_new = -(-end // BLOCK) - num_found
        shared = set(found.all_blocks)
        if num_new * len(self.windows) > len(set(self.queue) - shared):
            return
        self.table.admit(request, num_found * BLOCK)
        entries = self.kv.start(request.row, found, end)
        self.queue = [block for block in self.queue if block not in shared]
        columns = [
            [([0] * num_found + of_group)[i - num_found] for of_group in blocks]
            for i in range(num_found)
        ]
        self.running[request] = columns + self.take(num_new)
        self.tokens[request] = tokens
        self.num_filled[request] = num_found
        assert entries.blocks.reshape(len(blocks), -1).T.tolist() == self.running[request]
        self.cache.admit(request, num_found, end)
        self.table.num_computed[request.row] = end
        self.fill(request, end)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), chunk=st.integers(1, 9), generated=st.integers(0, 3))
    def go_on(self, data: st.DataObject, chunk: int, generated: int) -> None:
        """Compute on; in the end there are tokens to append."""
        request = data.draw(st.sampled_from(sorted(self.running, key=lambda r: r.arrival_index)))
        row = request.row
        if self.table.num_computed[row] == len(self.tokens[request]):
            token = np.array([generated], np.int32)
            self.table.append_tokens(np.array([row], np.int32), token)
            self.tokens[request].append(generated)
        start = int(self.table.num_computed[row])
        rows, before = np.array([row], np.int32), np.array([start], np.int32)
        self.leave_windows(request, rows, before)
        end = min(start + chunk, len(self.tokens[request]))
        missing = -(-end // BLOCK) - len(self.running[request])
        if missing * len(self.windows) > len(self.queue) or end >= MAX_LEN:
            return
        self.kv.grow(rows, np.array([missing], np.int32))
        if missing > 0:
            self.running[request] += self.take(missing)
        self.table.num_computed[row] = end
        self.cache.register(rows, before, np.array([end - start], np.int32))
        # A chunk is registered at once, what was there before in every fourth step.
        if end > start + 1:
            self.fill(request, end)
        self.num_steps += 1
        if self.num_steps % BLOCK == 0:
            self.fill(request, start)

    def leave_windows(self, request: Request, rows: Int32, before: Int32) -> None:
        columns, start = self.running[request], int(before[0])
        left = [
            (self.windows[group] or 0, i, group)
            for i, column in enumerate(columns)
            for group, block in enumerate(column)
            if block and not any(self.sees(group, p, i) for p in range(start, MAX_LEN))
        ]
        # A block that isn't full yet may be out of no window's reach.
        assert all((i + 1) * BLOCK <= start for _, i, _ in left)
        assert self.kv.fallen(rows, before).tolist() == (rows.tolist() if left else [])
        if not left:
            return
        self.cache.register_fallen(rows, before)
        self.fill(request, start)
        self.kv.free_fallen(rows, before)
        held = [b for r, own in self.running.items() if r is not request for c in own for b in c]
        for _, i, group in sorted(left):
            if columns[i][group] not in held:
                self.queue.append(columns[i][group])
            columns[i][group] = 0

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(sorted(self.running, key=lambda r: r.arrival_index)))
        self.cache.release([request])
        self.fill(request, int(self.table.num_computed[request.row]))
        self.kv.free(request.row)
        self.table.release(request)
        columns = self.running.pop(request)
        others = {block for held in self.running.values() for column in held for block in column}
        last_first = [block for column in reversed(columns) for block in column]
        self.queue += [block for block in last_first if block and block not in others]

    @rule()
    def reset(self) -> None:
        self.cache.reset()
        self.where = {}
        self.from_before_reset |= set(self.running)

    @invariant()
    def agrees(self) -> None:
        assert self.kv.pool.free_queue() == self.queue
        for request, columns in self.running.items():
            tables = self.kv.block_tables[:, request.row, : len(columns)]
            assert tables.T.tolist() == columns
        held = [b for columns in self.running.values() for column in columns for b in column]
        for block in range(1, self.num_blocks):
            assert self.kv.pool.ref_count(block) == held.count(block)


CacheOfSequences.TestCase.settings = settings(
    max_examples=int(os.environ.get("PREFIX_CACHE_EXAMPLES", "150")),
    stateful_step_count=50,
    deadline=None,
    derandomize=True,
    database=None,
)
TestCacheOfSequences = CacheOfSequences.TestCase
