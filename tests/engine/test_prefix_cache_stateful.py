"""The prefix cache against a model that keeps whole sequences instead of hashes, and a list as the free queue."""

from __future__ import annotations

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from jaxinfer.config import CacheConfig, ModelConfig
from jaxinfer.engine.kv_cache_manager import KVCacheManager
from jaxinfer.engine.prefix_cache import PrefixCache
from jaxinfer.engine.request import Request
from jaxinfer.engine.row_table import RowTable
from tests.engine.fake_executor import VOCAB, make_request

BLOCK, NUM_BLOCKS, NUM_ROWS, MAX_LEN = 4, 14, 4, 40
MODEL = ModelConfig("fake", "fake", "float32", MAX_LEN, VOCAB)

type Content = tuple[str | None, tuple[int, ...]]


class CacheOfSequences(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.table = RowTable(NUM_ROWS, VOCAB)
        self.kv = KVCacheManager(NUM_BLOCKS, BLOCK, NUM_ROWS, MAX_LEN // BLOCK)
        self.cache = PrefixCache(CacheConfig(BLOCK), self.kv, self.table)
        self.queue = list(range(1, NUM_BLOCKS))
        self.where: dict[Content, int] = {}
        self.running: dict[Request, list[int]] = {}
        self.tokens: dict[Request, list[int]] = {}
        self.from_before_reset: set[Request] = set()
        self.count = 0
        self.num_steps = 0

    def take(self, count: int) -> list[int]:
        blocks, self.queue = self.queue[:count], self.queue[count:]
        self.where = {c: b for c, b in self.where.items() if b not in blocks}
        return blocks

    def fill(self, request: Request, num_tokens: int) -> None:
        """The first `num_tokens` tokens are known and computed."""
        if request in self.from_before_reset:
            return
        for i in range(num_tokens // BLOCK):
            content = (request.cache_salt, tuple(self.tokens[request][: (i + 1) * BLOCK]))
            self.where.setdefault(content, self.running[request][i])

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
        expected = []
        for i in range((len(tokens) - 1) // BLOCK):
            block = self.where.get((salt, tuple(tokens[: (i + 1) * BLOCK])))
            if skips or block is None:
                break
            expected.append(block)
        found = self.cache.find(request)
        assert found == expected
        num_cached = len(found) * BLOCK
        end = min(len(tokens), num_cached + chunk)
        num_new = -(-end // BLOCK) - len(found)
        if num_new > len(set(self.queue) - set(found)):
            return
        self.table.admit(request, num_cached)
        entries = self.kv.start(request.row, found, end)
        self.queue = [block for block in self.queue if block not in found]
        self.running[request] = [*found, *self.take(num_new)]
        self.tokens[request] = tokens
        assert entries.blocks.tolist() == self.running[request]
        self.cache.admit(request, len(found), end)
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
        end = min(start + chunk, len(self.tokens[request]))
        missing = -(-end // BLOCK) - len(self.running[request])
        if missing > len(self.queue) or end >= MAX_LEN:
            return
        rows = np.array([row], np.int32)
        self.kv.grow(rows, np.array([missing], np.int32))
        self.running[request] += self.take(missing)
        self.table.num_computed[row] = end
        before = np.array([start], np.int32)
        self.cache.register(rows, before, np.array([end - start], np.int32))
        # A chunk is registered at once, what was there before in every fourth step.
        if end > start + 1:
            self.fill(request, end)
        self.num_steps += 1
        if self.num_steps % BLOCK == 0:
            self.fill(request, start)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(sorted(self.running, key=lambda r: r.arrival_index)))
        self.cache.release([request])
        self.fill(request, int(self.table.num_computed[request.row]))
        self.kv.free(request.row)
        self.table.release(request)
        blocks = self.running.pop(request)
        others = {block for held in self.running.values() for block in held}
        self.queue += [block for block in reversed(blocks) if block not in others]

    @rule()
    def reset(self) -> None:
        self.cache.reset()
        self.where = {}
        self.from_before_reset |= set(self.running)

    @invariant()
    def agrees(self) -> None:
        assert self.kv.pool.free_queue() == self.queue
        for request, blocks in self.running.items():
            assert self.kv.block_table[request.row, : len(blocks)].tolist() == blocks
        held = [block for blocks in self.running.values() for block in blocks]
        for block in range(1, NUM_BLOCKS):
            assert self.kv.pool.ref_count(block) == held.count(block)


CacheOfSequences.TestCase.settings = settings(
    max_examples=150, stateful_step_count=50, deadline=None, derandomize=True, database=None
)
TestCacheOfSequences = CacheOfSequences.TestCase
