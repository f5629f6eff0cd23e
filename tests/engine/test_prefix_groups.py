"""Groups of rows that share blocks, against every pair of block tables compared entry by entry."""

from __future__ import annotations

import random
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from jaxinfer.config import CascadeConfig
from jaxinfer.engine.kv_cache_manager import CachedPrefix, KVCacheManager
from jaxinfer.engine.plan import MAX_PREFIX_GROUPS
from jaxinfer.engine.prefix_groups import PrefixGrouping, PrefixOrder, best_groups
from jaxinfer.engine.request import Request
from jaxinfer.engine.row_table import RowTable
from jaxinfer.engine.scheduled_step import Batch
from tests.engine.core_runs import alone, make_core, run
from tests.engine.fake_requests import VOCAB, make_request

NUM_ROWS, WIDTH, MIN_BLOCKS = 9, 12, 2


def in_common(tables: dict[int, list[int]], a: int, b: int) -> int:
    count = 0
    while tables[a][count : count + 1] == tables[b][count : count + 1] != []:
        count += 1
    return count


class Rows(RuleBasedStateMachine):
    """Rows come with blocks of others, grow by blocks of their own, and leave their entries behind in the table."""

    def __init__(self) -> None:
        super().__init__()
        self.kv = KVCacheManager(2, 4, NUM_ROWS, WIDTH)
        self.order = PrefixOrder(self.kv, MIN_BLOCKS)
        self.tables: dict[int, list[int]] = {}
        self.unused = iter(range(1, 1_000_000))
        self.freed: list[int] = []

    def new_block(self, reuse: bool) -> int:
        held = {block for table in self.tables.values() for block in table}
        old = [block for block in self.freed if block not in held]
        return old[0] if reuse and old else next(self.unused)

    def write(self, row: int) -> None:
        table = self.tables[row]
        self.kv.block_table[row, : len(table)] = table
        self.kv.num_blocks[row] = len(table)

    @precondition(lambda self: len(self.tables) < NUM_ROWS)
    @rule(
        row=st.integers(0, NUM_ROWS - 1),
        donor=st.integers(0, NUM_ROWS - 1),
        num_shared=st.integers(0, WIDTH - 1),
        num_free=st.integers(0, 2),
        num_own=st.integers(0, 3),
        reuse=st.booleans(),
    )
    def admit(
        self, row: int, donor: int, num_shared: int, num_free: int, num_own: int, reuse: bool
    ) -> None:
        """`num_free` blocks are found beyond those of the donor: left behind by a request that has ended."""
        while row in self.tables:
            row = (row + 1) % NUM_ROWS
        found: list[int] = []
        if donor in self.tables:
            found = self.tables[donor][:num_shared]
            if len(found) == len(self.tables[donor]):
                found = found + [next(self.unused) for _ in range(num_free)]
        found = found[: WIDTH - 1]
        self.tables[row] = list(found)
        for _ in range(min(num_own, WIDTH - len(found))):
            self.tables[row].append(self.new_block(reuse))
        self.write(row)
        self.order.add(row, len(found))

    @precondition(lambda self: self.tables)
    @rule(data=st.data(), reuse=st.booleans())
    def grow(self, data: st.DataObject, reuse: bool) -> None:
        row = data.draw(st.sampled_from(sorted(self.tables)))
        if len(self.tables[row]) < WIDTH:
            self.tables[row].append(self.new_block(reuse))
            self.write(row)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        rows = data.draw(st.sets(st.sampled_from(sorted(self.tables)), min_size=1, max_size=3))
        self.order.remove(rows)
        for row in rows:
            self.freed += self.tables.pop(row)
            self.kv.num_blocks[row] = 0

    @invariant()
    def neighbours_share_what_their_tables_share(self) -> None:
        rows, shared = self.order.rows.tolist(), self.order.shared.tolist()
        assert sorted(rows) == sorted(self.tables)
        for i, a in enumerate(rows):
            least = WIDTH
            for j in range(i + 1, len(rows)):
                least = min(least, shared[j])
                truth = in_common(self.tables, a, rows[j])
                assert least == truth or max(least, truth) < MIN_BLOCKS


TestRows = Rows.TestCase
TestRows.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


def test_equal_blocks_after_different_ones_are_not_shared() -> None:
    """Where two requests computed the same first block at once, a third may hold the other one's second block."""
    kv = KVCacheManager(2, 4, 3, WIDTH)
    order = PrefixOrder(kv, MIN_BLOCKS)
    for row, table in enumerate([[1, 2, 3, 4], [9, 2, 3, 4]]):
        kv.block_table[row, :4], kv.num_blocks[row] = table, 4
        order.add(row, 4)
    assert order.rows.tolist() == [0, 1]
    assert order.shared.tolist() == [0, 0]


@given(
    st.lists(st.integers(0, 6), min_size=1, max_size=24),
    st.integers(2, 4),
    st.integers(1, 3),
)
@settings(max_examples=300, deadline=None)
def test_groups_are_disjoint_share_what_they_say_and_beat_any_single_group(
    shared: list[int], min_rows: int, min_blocks: int
) -> None:
    shared[0] = 0
    groups = best_groups(np.array(shared, np.int32), min_rows, min_blocks)
    assert len(groups) <= MAX_PREFIX_GROUPS
    seen: set[int] = set()
    saved = 0
    for members, num_blocks in groups:
        positions = members.tolist()
        assert len(positions) >= min_rows and num_blocks >= min_blocks
        assert seen.isdisjoint(positions)
        seen.update(positions)
        assert all(min(shared[a + 1 : b + 1]) >= num_blocks for a, b in pairwise(positions))
        saved += (len(positions) - 1) * num_blocks
    for a in range(len(shared)):
        for b in range(a + max(min_rows, 2), len(shared) + 1):
            least = min(shared[a + 1 : b])
            assert least < min_blocks or saved >= (b - a - 1) * least


def sizes(groups: list) -> list[tuple[int, int]]:
    return [(len(members), num_blocks) for members, num_blocks in groups]


def test_a_few_that_share_more_leave_the_group_of_those_that_share_less() -> None:
    shared = np.array([0] + [16] * 20 + [64] * 9 + [16] * 20, np.int32)
    assert sizes(best_groups(shared, 8, 16)) == [(40, 16), (10, 64)]
    shared[21:30] = 17  # Not worth a group of their own.
    assert sizes(best_groups(shared, 8, 16)) == [(50, 16)]


def test_more_groups_than_may_be() -> None:
    """Ten tenants under one system prompt: the largest eight, or all of them by what all share."""
    tenants = np.tile(np.array([16] + [40] * 9, np.int32), 10)
    assert sizes(best_groups(tenants, 8, 8)) == [(10, 40)] * MAX_PREFIX_GROUPS
    tenants[tenants == 40] = 18
    assert sizes(best_groups(tenants, 8, 8)) == [(100, 16)]


def test_beginnings_that_branch_row_by_row_stay_cheap() -> None:
    shared = np.arange(1024, dtype=np.int32) + 15
    assert len(best_groups(shared, 8, 16)) >= 1


def grouping(num_rows: int, **config: int) -> tuple[PrefixGrouping, RowTable, Batch]:
    """`num_rows` requests of 40 tokens that share 8 blocks of 4 with the first, all computed but the last token."""
    kv, table = KVCacheManager(400, 4, 16, 12), RowTable(16, VOCAB)
    groups = PrefixGrouping(CascadeConfig(**config), kv, table)
    requests = []
    for i in range(num_rows):
        request = Request(make_request(str(i), 40), FAKE_MODEL, i)
        row = table.admit(request, 39)
        found = kv.block_table[requests[0].row, :8].tolist() if requests else []
        kv.start(row, CachedPrefix(len(found), [found]), 40)
        groups.admit(row, len(found))
        requests.append(request)
    return groups, table, Batch.of(requests, table)


FAKE_MODEL = make_core()[0].config.model


@pytest.mark.parametrize(("min_rows", "min_tokens", "found"), [(5, 32, 8), (6, 32, 0), (5, 33, 0)])
def test_thresholds(min_rows: int, min_tokens: int, found: int) -> None:
    groups, _, batch = grouping(5, min_rows=min_rows, min_tokens=min_tokens)
    arranged, result = groups.arrange(batch)
    if found:
        assert result is not None
        assert (result.num_rows.tolist(), result.num_blocks.tolist()) == ([5], [8])
    else:
        assert result is None and arranged is batch


def test_disabled() -> None:
    groups, _, batch = grouping(5, enabled=False, min_rows=2, min_tokens=4)
    assert groups.arrange(batch) == (batch, None)


def test_the_same_batch_gets_the_same_objects() -> None:
    groups, _, batch = grouping(5, min_rows=2, min_tokens=4)
    first = groups.arrange(batch)
    assert all(a is b for a, b in zip(first, groups.arrange(batch), strict=True))


def test_a_row_that_only_now_fills_the_last_shared_block_shares_one_fewer() -> None:
    groups, table, batch = grouping(5, min_rows=2, min_tokens=4)
    table.num_computed[batch.rows[0]] = 31
    _, result = groups.arrange(batch)
    assert result is not None and result.num_blocks.tolist() == [7]


def test_rows_of_the_batch_only() -> None:
    groups, _, batch = grouping(5, min_rows=2, min_tokens=4)
    part = batch.take(np.array([3, 1, 4]))
    arranged, result = groups.arrange(part)
    assert result is not None and result.num_rows.tolist() == [3]
    assert sorted(arranged.rows.tolist()) == sorted(part.rows.tolist())
    assert [batch.rows.tolist().index(row) for row in arranged.rows] == [
        int(request_id) for request_id in arranged.request_ids
    ]


@pytest.mark.parametrize("overlap", [True, False])
def test_requests_come_and_go_among_two_prefixes(overlap: bool) -> None:
    """The fake device checks what the plans say; the tokens are those of each request by itself."""
    rng = random.Random(3)
    prefixes = [[rng.randrange(VOCAB) for _ in range(12)] for _ in range(2)]
    requests = [
        make_request(
            str(i),
            prefixes[i % 2][: rng.choice([12, 12, 8, 0])]
            + [rng.randrange(VOCAB) for _ in range(1 + i % 3)],
            max_tokens=rng.randrange(2, 14),
        )
        for i in range(40)
    ]
    core, executor = make_core(
        90, max_num_seqs=10, budget=24, overlap=overlap, cascade=CascadeConfig(True, 3, 8)
    )
    collected = run(core, requests)
    for request in requests:
        name = request.request_id
        assert (collected.tokens[name], collected.ends[name]) == alone(request)
    assert executor.num_grouped > 100
    assert any(
        plan.prefix_groups is not None and len(plan.prefix_groups.num_rows) == 2
        for plan in executor.plans
    )
