"""How the decode kernel's work is cut, and what sizes it takes."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels_pallas.ragged_paged_attention.mosaic_gpu import config as configs
from kernels_pallas.ragged_paged_attention.mosaic_gpu.decode_plan import (
    ITEM_COST,
    Row,
    Walk,
    item_of,
    plan_decode,
)
from kernels_pallas.ragged_paged_attention.mosaic_gpu.decode_shape import DecodeShape

_plan = jax.jit(
    plan_decode,
    static_argnames=(
        "block",
        "alignment",
        "sliding_window",
        "num_kv_heads",
        "num_walks",
        "min_blocks",
    ),
)


@pytest.mark.jax_floor
@pytest.mark.parametrize(
    ("num_kv_heads", "num_walks", "min_blocks", "window"),
    [(1, 1, 1, None), (2, 9, 1, None), (3, 4, 2, 9), (1, 7, 4, 1)],
)
@settings(max_examples=40, deadline=None)
@given(rows=st.lists(st.tuples(st.integers(0, 40), st.integers(0, 2)), min_size=7, max_size=7))
def test_walks_take_every_block_once_and_equal_shares(
    rows, num_kv_heads, num_walks, min_blocks, window
):
    seq_lens = np.array([length for length, _ in rows], np.int32)
    query_lens = np.array([tokens for _, tokens in rows], np.int32)
    plan = _plan(
        seq_lens,
        np.cumsum(query_lens, dtype=np.int32) - query_lens,
        query_lens,
        block=4,
        alignment=2,
        sliding_window=window,
        num_kv_heads=num_kv_heads,
        num_walks=num_walks,
        min_blocks=min_blocks,
    )
    row_table, walks = np.asarray(plan.rows), [Walk(*row) for row in np.asarray(plan.walks)]
    taken: dict[tuple[int, int], list[int]] = {}
    starts: dict[tuple[int, int], list[tuple[int, bool, bool]]] = {}
    for number, walk in enumerate(walks):
        cost = 0
        for index in range(walk.count):
            item = item_of(row_table, walk, np.int32(index))
            key = (int(item.head), int(item.row.request))
            first, count = int(item.first_block), int(item.num_blocks)
            begins = int(item.row.begin) + 4 * np.arange(first, first + count)
            taken.setdefault(key, []).extend(begins.tolist())
            starts.setdefault(key, []).append((number, bool(item.opens), bool(item.closes)))
            cost += count
        assert cost <= int(walk.share)
        assert walk.share >= min_blocks + ITEM_COST
    for head in range(num_kv_heads):
        for request, (seq_len, tokens) in enumerate(rows):
            key = (head, request)
            if tokens == 0:
                assert key not in taken
                continue
            first = 0 if window is None else max(seq_len - tokens + 1 - window, 0) // 2 * 2
            assert taken[key] == list(range(first, seq_len, 4))
            # Opened once, closed once, by neighbours.
            numbers = [number for number, _, _ in starts[key]]
            assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
            assert [opens for _, opens, _ in starts[key]] == [True] + [False] * (len(numbers) - 1)
            assert [closes for *_, closes in starts[key]] == [False] * (len(numbers) - 1) + [True]


def test_plan_gives_long_contexts_to_many_walks():
    one = jnp.ones(2, jnp.int32)
    plan = plan_decode(
        jnp.array([6400, 64], jnp.int32), jnp.arange(2, dtype=jnp.int32), one,
        block=64, alignment=16, sliding_window=None, num_kv_heads=2, num_walks=10, min_blocks=4,
    )  # fmt: skip
    rows = [Row(*row) for row in np.asarray(plan.rows).tolist()]
    assert [(row.num_blocks, row.start) for row in rows] == [(100, 0), (1, 102)]
    # 210 blocks and what starting and ending costs, in 10 shares.
    assert [tuple(walk[:3]) for walk in np.asarray(plan.walks).tolist()] == [
        *[(0, 0, 1)] * 4,
        (0, 0, 2),
        *[(1, 0, 1)] * 4,
        (1, 0, 2),
    ]


def test_shapes_take_as_many_tokens_as_fit():
    tokens = {group: DecodeShape.of(group, 128, 8).tokens for group in (1, 4, 5, 7, 8, 16, 40, 64)}
    assert tokens == {1: 8, 4: 8, 5: 8, 7: 8, 8: 8, 16: 4, 40: 1, 64: 1}
    assert DecodeShape.of(4, 128, 8).columns == 32
    assert DecodeShape.of(8, 256, 8).tokens == 4
    # 80 numbers of 16 bits: every fourth row begins at a multiple of 128 bytes.
    assert DecodeShape.of(5, 80, 1).heads == 8
    halves = DecodeShape.of(64, 256, 8)
    assert (halves.group, halves.splits, halves.tokens) == (32, 2, 1)


@pytest.mark.parametrize("page_itemsize", [1, 2])
@pytest.mark.parametrize("head_size", configs.head_sizes())
def test_tuned_sizes_fit_with_enough_in_flight(head_size, page_itemsize):
    for group in (1, 4, 5, 7, 8, 16, 33, 64):
        for tokens in (1, 2, 8):
            columns = DecodeShape.of(group, head_size, tokens).columns
            config = configs.decode_config(head_size, columns, page_itemsize)
            config.check(head_size, columns, page_itemsize)
            assert config.bytes_in_flight(head_size, page_itemsize) >= 64 << 10
            used = config.shared_memory(head_size, columns, page_itemsize)
            whole = configs.SHARED_MEMORY_PER_CORE
            assert config.blocks_per_core * (used + 1024) <= whole
