"""The longest prefix that all groups of layers have, against looking at each block of each prefix."""

from __future__ import annotations

import numpy as np
import pytest

from jaxinfer.engine.block_hash import group_key
from jaxinfer.engine.kv_cache_manager import CachedPrefix, KVCacheManager
from jaxinfer.engine.longest_prefix import longest_prefix

BLOCK, COLUMNS = 4, 9


def has_what_is_seen(
    present: list[dict[int, int]], windows: tuple[int | None, ...], length: int
) -> bool:
    """Whether the token after `length` columns finds all that it looks back at."""
    for blocks, window in zip(present, windows, strict=True):
        seen = range(length * BLOCK)
        if window is not None:
            seen = [p for p in seen if length * BLOCK - p < window]
        if any(position // BLOCK not in blocks for position in seen):
            return False
    return True


@pytest.mark.parametrize(
    "windows", [(None,), (None, 6), (None, 9, 9, 1), (5,), (3, 14), (None, 4, 12), (2, 7, 20)]
)
def test_every_prefix_is_looked_at(windows: tuple[int | None, ...]) -> None:
    rng = np.random.default_rng(len(windows))
    keys = [bytes([i]) * 32 for i in range(COLUMNS)]
    lengths = []
    for _ in range(600):
        kv = KVCacheManager(COLUMNS * len(windows) + 1, BLOCK, 1, COLUMNS, windows)
        blocks = iter(kv.pool.allocate(COLUMNS * len(windows)))
        present: list[dict[int, int]] = []
        for group in range(len(windows)):
            there = np.flatnonzero(rng.random(COLUMNS) < rng.choice([0.6, 0.9, 0.97]))
            present.append({column: next(blocks) for column in there.tolist()})
            kv.pool.register(
                present[-1].values(), [group_key(keys[column], group) for column in present[-1]]
            )
        known = int(rng.integers(0, COLUMNS + 1))
        length = max(n for n in range(known + 1) if has_what_is_seen(present, windows, n))
        of_groups = [
            [
                there[c]
                for c in range(length)
                if window is None or length * BLOCK - (c * BLOCK + BLOCK - 1) < window
            ]
            for there, window in zip(present, windows, strict=True)
        ]
        assert longest_prefix(kv, keys[:known]) == CachedPrefix(length, of_groups)
        lengths.append(length)
    assert min(lengths) == 0 and len(set(lengths)) > 5
