from __future__ import annotations

import numpy as np
import pytest

from jaxinfer.engine.kv_cache_manager import CachedPrefix, KVCacheManager


def grow(kv: KVCacheManager, rows: list[int], num_tokens: list[int]) -> list[tuple[int, int, int]]:
    index = np.array(rows, np.int32)
    entries = kv.grow(index, kv.missing(index, np.array(num_tokens, np.int32)))
    return list(zip(*(array.tolist() for array in entries), strict=True))


def test_blocks_follow_the_tokens() -> None:
    kv = KVCacheManager(num_blocks=20, block_size=4, num_rows=3, max_blocks_per_row=8)
    assert grow(kv, [2, 0], [9, 4]) == [(2, 0, 1), (2, 1, 2), (2, 2, 3), (0, 0, 4)]
    assert grow(kv, [0, 2], [4, 12]) == []
    assert grow(kv, [0, 1, 2], [5, 1, 12]) == [(0, 1, 5), (1, 0, 6)]
    assert grow(kv, [1, 2], [12, 13]) == [(1, 1, 7), (1, 2, 8), (2, 3, 9)]
    assert kv.num_blocks.tolist() == [2, 3, 4]
    assert kv.block_table[:, :4].tolist() == [[4, 5, 0, 0], [6, 7, 8, 0], [1, 2, 3, 9]]


def test_the_end_of_a_sequence_is_handed_out_before_its_start() -> None:
    kv = KVCacheManager(num_blocks=5, block_size=4, num_rows=2, max_blocks_per_row=4)
    grow(kv, [0], [16])
    assert kv.free(0) == 4
    assert grow(kv, [1], [12]) == [(1, 0, 4), (1, 1, 3), (1, 2, 2)]
    assert kv.free(0) == 0, "a row without blocks has none to give back"


def test_a_row_starts_with_shared_blocks_and_goes_on_with_its_own() -> None:
    kv = KVCacheManager(num_blocks=9, block_size=4, num_rows=3, max_blocks_per_row=4)
    grow(kv, [0], [12])
    entries = kv.start(1, CachedPrefix(2, [[1, 2]]), 13)
    assert [array.tolist() for array in entries] == [[1] * 4, [0, 1, 2, 3], [1, 2, 4, 5]]
    assert [kv.pool.ref_count(block) for block in range(1, 6)] == [2, 2, 1, 1, 1]
    assert kv.free(0) == 1, "the others are still in use"
    assert kv.free(1) == 4
    # Freed ones are taken back, wherever they stand in the queue.
    assert kv.pool.free_queue() == [6, 7, 8, 3, 5, 4, 2, 1]
    entries = kv.start(2, CachedPrefix(2, [[2, 4]]), 8)
    assert entries.blocks.tolist() == [2, 4] and kv.pool.free_queue() == [6, 7, 8, 3, 5, 1]


def test_a_pool_that_is_too_small_raises_and_gives_nothing() -> None:
    kv = KVCacheManager(num_blocks=4, block_size=4, num_rows=2, max_blocks_per_row=4)
    with pytest.raises(RuntimeError, match="4 KV-cache blocks wanted, 3 are free"):
        grow(kv, [0, 1], [8, 5])
    assert kv.pool.num_free == 3 and not kv.num_blocks.any()
