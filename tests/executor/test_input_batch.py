"""The packed inputs of a step against a token-by-token construction."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxinfer.engine.plan import (
    MAX_PREFIX_GROUPS,
    AdmittedRow,
    ForcedTokens,
    PrefixGroups,
    StepPlan,
)
from jaxinfer.executor.buckets import BucketLadder
from jaxinfer.executor.input_batch import FROM_DEVICE, InputBatch, PackedLayout, table_names
from jaxinfer.sampling_params import SamplingParams

NUM_ROWS, MAX_PAGES, PAGE = 8, 16, 4
OFFSETS = np.array([[0], [1000], [500]], np.int32)
"""Between the blocks of a group and those of the first."""


@st.composite
def steps(draw):
    """Rows with known tokens, of which a chunk is scheduled, or the one token after them that only the device has."""
    rows = draw(st.permutations(range(NUM_ROWS)))[: draw(st.integers(1, NUM_ROWS))]
    requests = []
    for row in rows:
        known = draw(st.integers(1, MAX_PAGES * PAGE - 1))
        if draw(st.booleans()):
            computed, scheduled = known, 1
        else:
            computed = draw(st.integers(0, known - 1))
            scheduled = draw(st.integers(1, known - computed))
        requests.append((row, known, computed, scheduled))
    requests.sort(key=lambda r: r[3] > 1)
    pages = draw(st.permutations(range(1, NUM_ROWS * MAX_PAGES + 1)))
    return requests, pages


def test_slots_of_adapters_come_after_all_that_others_read():
    ladder = BucketLadder.create(512, NUM_ROWS, MAX_PAGES)
    plain, adapted = (
        InputBatch(NUM_ROWS, MAX_PAGES, PAGE, ladder, has_adapters=has) for has in (False, True)
    )
    admitted = [
        AdmittedRow(row, np.arange(9, dtype=np.int32), 9, SamplingParams(), slot)
        for row, slot in ((3, 2), (1, 0), (0, 1))
    ]
    plan = StepPlan(
        admitted=admitted,
        rows=np.array([3, 1, 0], np.int32),
        num_scheduled=np.array([1, 2, 4], np.int32),
        num_computed=np.array([8, 0, 3], np.int32),
        samples=np.zeros(3, bool),
        block_rows=np.zeros(0, np.int32),
        block_cols=np.zeros(0, np.int32),
        block_ids=np.zeros(0, np.int32),
    )
    for batch in (plain, adapted):
        batch.apply(plan)
    (shape, without), (_, packed) = plain.pack(plan), adapted.pack(plan)
    assert packed[: len(without)].tolist() == without.tolist()
    slots = PackedLayout(shape, has_adapters=True).views(packed)["adapter_slots"]
    assert slots.tolist() == [2, 0, 0, 1, 1, 1, 1, *[0] * (shape.num_tokens - 7)]


@settings(max_examples=200, deadline=None)
@pytest.mark.parametrize("num_groups", [1, 3])
@given(step=steps())
def test_pack_matches_one_token_at_a_time(num_groups, step):
    requests, pages = step
    ladder = BucketLadder.create(512, NUM_ROWS, MAX_PAGES)
    batch = InputBatch(NUM_ROWS, MAX_PAGES, PAGE, ladder, num_groups=num_groups)
    admitted, blocks, tables, tokens = [], [], {}, {}
    free = iter(pages)
    for row, known, computed, scheduled in requests:
        tokens[row] = np.arange(known, dtype=np.int32) + 1000 * row + 7
        admitted.append(AdmittedRow(row, tokens[row], known, SamplingParams()))
        tables[row] = [next(free) for _ in range(-(-(computed + scheduled) // PAGE))]
        blocks += [(row, col, block) for col, block in enumerate(tables[row])]
    columns = np.array(blocks, np.int32).T
    plan = StepPlan(
        admitted=admitted,
        rows=np.array([r[0] for r in requests], np.int32),
        num_computed=np.array([r[2] for r in requests], np.int32),
        num_scheduled=np.array([r[3] for r in requests], np.int32),
        samples=np.array([r[2] + r[3] >= r[1] for r in requests]),
        block_rows=columns[0],
        block_cols=columns[1],
        block_ids=columns[2] if num_groups == 1 else columns[2] + OFFSETS[:num_groups],
    )
    batch.apply(plan)
    shape, packed = batch.pack(plan)
    got = PackedLayout(shape, num_groups).views(packed)

    t = 0
    for r, (row, known, computed, scheduled) in enumerate(requests):
        assert got["query_start_loc"][r] == t
        assert got["rows"][r] == row
        assert got["seq_lens"][r] == computed + scheduled
        for group in range(num_groups):
            table, used = got[table_names(group)[1]][r], np.array(tables[row])
            np.testing.assert_array_equal(table[: len(used)], used + OFFSETS[group])
            assert not table[len(used) :].any()
        for position in range(computed, computed + scheduled):
            expected = tokens[row][position] if position < known else FROM_DEVICE
            assert got["token_ids"][t] == expected
            assert got["positions"][t] == position
            for group in range(num_groups):
                page = tables[row][position // PAGE] + int(OFFSETS[group, 0])
                assert got[table_names(group)[0]][t] == page * PAGE + position % PAGE
            t += 1
    num_rows = len(requests)
    assert (got["query_start_loc"][num_rows:] == t).all()
    assert not got["seq_lens"][num_rows:].any()
    assert (got["rows"][num_rows:] == NUM_ROWS).all()
    for name in ("token_ids", "positions", "slot_mapping"):
        assert not got[name][t:].any()
    assert shape.decode_only == (t == num_rows)
    assert shape in set(ladder.all_shapes())


def test_ladder_has_no_lone_row_and_covers_its_limits():
    ladder = BucketLadder.create(1000, 48, 2000)
    assert ladder.shape(1, 1, 1) == (2, 2, 512, True, 0)
    assert ladder.shape(48, 48, 513) == (48, 48, 2000, True, 0)
    assert ladder.shape(1000, 48, 33) == (1000, 48, 512, False, 0)
    assert ladder.shape(17, 3, 512) == (32, 8, 512, False, 0)
    assert BucketLadder.create(64, 8, 100).pages == (100,)
    shapes = list(ladder.all_shapes())
    assert len(shapes) == len(set(shapes))
    for tokens in range(1, 1001, 7):
        for rows in (1, 5, 48):
            if rows <= tokens:
                assert ladder.shape(tokens, rows, 9) in shapes


def test_large_steps_are_padded_by_at_most_half():
    for budget in (1024, 2500):
        ladder = BucketLadder.create(budget, 64, 100)
        for tokens in range(budget // 2 + 1, budget + 1):
            assert ladder.shape(tokens, 8, 9).num_tokens <= 1.5 * tokens


def test_forced_tokens_are_the_hosts_until_the_row_passes_on():
    batch = InputBatch(NUM_ROWS, MAX_PAGES, PAGE, BucketLadder.create(64, NUM_ROWS, MAX_PAGES))

    def fed(computed, scheduled, admitted=(), forced=()):
        one = [np.array([n], np.int32) for n in (3, computed, scheduled)]
        empty = np.empty(0, np.int32)
        plan = StepPlan(
            list(admitted),
            one[0],
            one[2],
            one[1],
            np.array([True]),
            empty,
            empty,
            empty,
            list(forced),
        )
        batch.apply(plan)
        shape, packed = batch.pack(plan)
        return PackedLayout(shape).views(packed)["token_ids"][:scheduled].tolist()

    prompt = np.array([11, 12, 13, 14, 15], np.int32)
    assert fed(0, 5, [AdmittedRow(3, prompt, 5, SamplingParams())]) == prompt.tolist()
    assert fed(5, 1) == [FROM_DEVICE]
    run = ForcedTokens(3, 6, np.array([21, 22, 23], np.int32))
    assert fed(6, 2, forced=[run]) == [21, 22]
    assert fed(8, 1) == [23]
    assert fed(9, 1) == [FROM_DEVICE]
    # Another request in the same row knows nothing of them.
    longer = np.arange(30, 42, dtype=np.int32)
    assert fed(0, 8, [AdmittedRow(3, longer, 12, SamplingParams())]) == longer[:8].tolist()
    assert fed(8, 4) == longer[8:].tolist()
    assert fed(12, 1) == [FROM_DEVICE]


def test_steps_of_enough_decodes_have_a_shape_for_groups():
    ladder = BucketLadder.create(64, 32, 100, min_grouped_rows=8)
    assert ladder.shape(9, 9, 1, grouped=True) == (16, 16, 100, True, MAX_PREFIX_GROUPS)
    assert ladder.shape(9, 9, 1) == (16, 16, 100, True, 0)
    assert ladder.shape(4, 4, 1, grouped=True) == (4, 4, 100, True, 0)
    assert ladder.shape(12, 9, 1, grouped=True) == (16, 32, 100, False, 0)
    without = BucketLadder.create(64, 32, 100)
    assert without.shape(9, 9, 1, grouped=True) == without.shape(9, 9, 1)
    new = set(ladder.all_shapes()) - set(without.all_shapes())
    assert new == {(rows, rows, 100, True, MAX_PREFIX_GROUPS) for rows in (8, 16, 32)}


def test_pack_writes_what_each_group_shares():
    ladder = BucketLadder.create(64, 8, MAX_PAGES, min_grouped_rows=2)
    batch = InputBatch(NUM_ROWS, MAX_PAGES, PAGE, ladder)
    rng = np.random.default_rng(0)
    batch.block_tables[:-1] = rng.permutation(NUM_ROWS * MAX_PAGES).reshape(NUM_ROWS, -1) + 1
    batch.admitted[:] = [AdmittedRow(r, np.arange(41), 41, SamplingParams()) for r in range(8)]
    batch.num_known[:] = 41
    none, ones = np.empty(0, np.int32), np.ones(6, np.int32)
    plan = StepPlan(
        admitted=[],
        rows=np.array([5, 2, 0, 7, 3, 1], np.int32),
        num_computed=40 * ones,
        num_scheduled=ones,
        samples=ones != 0,
        block_rows=none,
        block_cols=none,
        block_ids=none,
        prefix_groups=PrefixGroups(np.array([2, 3], np.int32), np.array([4, 9], np.int32)),
    )
    shape, packed = batch.pack(plan)
    got = PackedLayout(shape).views(packed)
    assert shape == (8, 8, MAX_PAGES, True, MAX_PREFIX_GROUPS)
    assert got["prefix_start_loc"].tolist() == [0, 2] + [5] * (MAX_PREFIX_GROUPS - 1)
    assert got["prefix_lens"].tolist() == [4 * PAGE, 9 * PAGE] + [0] * (MAX_PREFIX_GROUPS - 2)
    expected = np.zeros((MAX_PREFIX_GROUPS, MAX_PAGES), np.int32)
    expected[0, :4] = batch.block_tables[5, :4]
    expected[1, :9] = batch.block_tables[0, :9]
    np.testing.assert_array_equal(got["prefix_tables"], expected)
    # The rows' own tables and lengths are whole all the same.
    np.testing.assert_array_equal(got["block_tables"][:6], batch.block_tables[plan.rows])
    assert got["seq_lens"].tolist() == [41] * 6 + [0] * 2


def test_pieces_start_where_a_kernel_can_take_them():
    shapes = BucketLadder.create(1000, 48, 2000).all_shapes()
    for shape, num_groups in product(shapes, (1, 3)):
        layout = PackedLayout(shape, num_groups)
        packed = np.zeros(layout.size, np.int32)
        begin = packed.__array_interface__["data"][0]
        end = 0
        for name, view in layout.views(packed).items():
            start = view.__array_interface__["data"][0] - begin
            assert start % 256 == 0, (shape, name)
            assert start >= end, (shape, name)
            end = start + view.nbytes
        assert packed.nbytes - 256 < end <= packed.nbytes
